"""torchtitan's text log, in colours and without, of one rank or of all."""

from __future__ import annotations

import math
from pathlib import Path

from tests.rules.replay.logs import events_of, records_of, rows_of

COLOURED = (
    b"[rank0]:[titan] 2025-06-01 12:00:00,123 - root - INFO - Training starts at step 1\n"
    b"[rank0]:[titan] 2025-06-01 12:00:01,500 - root - INFO - \x1b[31mstep:  1  \x1b[32mloss: 12.2722  \x1b[38;2;180;60;0mgrad_norm:  3.4210  \x1b[38;2;54;234;195mmemory:  1.04GiB(3.62%)  \x1b[34mtps: 1,214  \x1b[36mtflops: 0.08  \x1b[35mmfu: 0.03%\x1b[39m\n"
    b"[rank1]:[titan] 2025-06-01 12:00:01,500 - root - INFO - \x1b[31mstep:  1  \x1b[32mloss: 12.2722  \x1b[38;2;180;60;0mgrad_norm:  3.4210\x1b[39m\n"
    b"[rank0]:[titan] 2025-06-01 12:00:11,500 - root - INFO - \x1b[31mstep: 10  \x1b[32mloss:     nan  \x1b[38;2;180;60;0mgrad_norm:     nan  \x1b[38;2;54;234;195mmemory:  1.04GiB(3.62%)  \x1b[34mtps: 12,140\x1b[39m\n"
)
PLAIN = b"2024-07-10 12:00:00,123 - root - INFO - step: 10  loss:  7.7123  memory: 31.25GiB(40.12%)  wps: 6,512  mfu: 40.01%\n"


def test_colours_ranks_and_thousands(tmp_path: Path) -> None:
    rows, notices = rows_of("torchtitan", COLOURED)
    assert notices == []
    assert len(rows) == 2
    assert rows[0]["grad_norm"] == 3.421
    assert (rows[0]["memory_gib"], rows[0]["tps"], rows[0]["mfu_percent"]) == (1.04, 1214, 0.03)
    assert math.isnan(rows[1]["loss"])
    assert rows[1]["time"] - rows[0]["time"] == 10
    path = tmp_path / "titan.log"
    path.write_bytes(COLOURED)
    assert [record.step for record in records_of(path)] == [1, 10]


def test_without_colours() -> None:
    (row,) = rows_of("torchtitan", PLAIN)[0]
    assert (row["step"], row["loss"], row["wps"]) == (10, 7.7123, 6512)


def test_a_validation_is_an_evaluation(tmp_path: Path) -> None:
    path = tmp_path / "titan.log"
    path.write_bytes(PLAIN + PLAIN.replace(b"step: 10", b"validate step: 10").replace(b"7.7123", b"7.9"))
    (record,) = records_of(path)
    assert (record.value("loss"), record.value("val_loss")) == (7.7123, 7.9)
    assert [event.kind for event in events_of(path)] == ["start", "evaluation"]
