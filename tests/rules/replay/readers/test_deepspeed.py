"""DeepSpeed's text log."""

from __future__ import annotations

from pathlib import Path

from tests.rules.replay.logs import placed_of, records_of, rows_of

LOG = b"""[2023-11-07 01:55:05,614] [INFO] [logging.py:96:log_dist] [Rank 0] DeepSpeed info: version=0.12.3, git-hash=unknown, git-branch=unknown
[2023-11-07 01:55:06,614] [INFO] [loss_scaler.py:190:update_scale] [deepspeed] OVERFLOW! Rank 0 Skipping step. Attempted loss scale: 65536, but hysteresis is 2. Reducing hysteresis to 1
[2023-11-07 01:55:08,040] [INFO] [loss_scaler.py:183:update_scale] [deepspeed] OVERFLOW! Rank 0 Skipping step. Attempted loss scale: 65536, reducing to 32768
[2023-11-07 01:55:23,711] [INFO] [logging.py:96:log_dist] [Rank 0] step=10, skipped=2, lr=[4.99804827338393e-05, 1e-05], mom=[(0.9, 0.95), (0.9, 0.95)]
steps: 10 loss: 8.9132 iter time (s): 1.253 samples/sec: 25.531
[2023-11-07 01:55:23,714] [INFO] [timer.py:260:stop] epoch=0/micro_step=40/global_step=10, RunningAvgSamplesPerSec=25.025771473496132, CurrSamplesPerSec=25.704280480541442, MemAllocated=4.32GB, MaxMemAllocated=38.49GB
[2023-11-07 01:55:36,711] [INFO] [logging.py:96:log_dist] [Rank 0] step=20, skipped=2, lr=[4.9e-05, 1e-05], mom=[(0.9, 0.95), (0.9, 0.95)]
steps: 20 loss: nan iter time (s): 1.250 samples/sec: 25.600
"""


def test_progress_and_pipeline_lines_of_a_step_are_one_record(tmp_path: Path) -> None:
    path = tmp_path / "ds.log"
    path.write_bytes(LOG)
    first, second = records_of(path)
    assert (first.step, first.stride, second.step) == (10, 10, 20)
    assert first.signals == {
        "skipped": 2,
        "lr": 4.99804827338393e-05,
        "loss_scale": 32768,
        "loss": 8.9132,
        "step_duration_seconds": 1.253,
        "pipeline_samples_per_second": 25.531,
        "samples_per_second": 25.704280480541442,
    }
    assert second.value("skipped") == 0  # the log counts from the start
    assert str(second.value("loss")) == "nan"
    assert second.time - first.time == 13


def test_without_a_loss_it_says_so(tmp_path: Path) -> None:
    path = tmp_path / "ds.log"
    path.write_bytes(b"".join(line for line in LOG.splitlines(keepends=True) if not line.startswith(b"steps")))
    _, notices = placed_of(path)
    assert [row["kind"] for row in notices] == ["no_loss"]


def test_it_is_recognised_by_either_line() -> None:
    assert rows_of("deepspeed", b"steps: 10 loss: 8.9 iter time (s): 1.2 samples/sec: 3.4\n")[0][0]["loss"] == 8.9
