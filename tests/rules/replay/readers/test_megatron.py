"""Megatron-LM's text log."""

from __future__ import annotations

import math
from pathlib import Path

from tests.rules.replay.logs import events_of, records_of, rows_of

LOG = b"""using world size: 8, data-parallel size: 2
------------------------ arguments ------------------------
  lr .............................................. 0.00015
[before the start of training step] datetime: 2025-04-13 23:41:00
 [2025-04-13 23:41:12] iteration       10/    1000 | consumed samples:          160 | elapsed time per iteration (ms): 1147.6 | learning rate: 0.000000E+00 | global batch size:    16 | loss scale: 8388608.0 | number of skipped iterations:  10 | number of nan iterations:   0 |
Number of parameters in transformer block in billions:  0.08
[Rank 0] (after 10 iterations) memory (MB) | allocated: 1464.33154296875 | max allocated: 1464.3408203125
 [2025-04-13 23:41:22] iteration       20/    1000 | consumed samples:          320 | elapsed time per iteration (ms): 1000.0 | learning rate: 1.342E-04 | global batch size:    16 | lm loss: 7.399415E+00 | loss scale: 65536.0 | grad norm: 2.918 | num zeros: 0.0 | number of skipped iterations:   1 | number of nan iterations:   0 |
time (ms) | forward-compute: 53.79 | optimizer: 49.42 | batch-generator: 2.35
 [2025-04-13 23:41:32] iteration       30/    1000 | consumed samples:          480 | elapsed time per iteration (ms): 1000.0 | learning rate: 1.342E-04 | global batch size:    16 | lm loss: NAN | loss scale: 65536.0 | grad norm: nan | number of skipped iterations:   0 | number of nan iterations:   2 |Number of parameters: 6.98
-----------------------------------------------------------------------------------------------
 validation loss at iteration 30 | lm loss value: 6.121212E+00 | lm loss PPL: 4.553E+02 |
-----------------------------------------------------------------------------------------------
"""


def test_a_line_gives_its_numbers_by_its_own_names() -> None:
    rows, notices = rows_of("megatron", LOG)
    assert notices == []
    assert [row["step"] for row in rows] == [10, 20, 30, 30]
    assert "lm loss" not in rows[0]
    assert rows[1] == {
        "step": 20,
        "consumed samples": 320,
        "step_duration_seconds": 1.0,
        "learning rate": 1.342e-4,
        "global batch size": 16,
        "lm loss": 7.399415,
        "loss scale": 65536,
        "grad norm": 2.918,
        "num zeros": 0,
        "number of skipped iterations": 1,
        "number of nan iterations": 0,
        "time": rows[0]["time"] + 10,
    }
    assert math.isnan(rows[2]["lm loss"])
    assert rows[3] == {"step": 30, "validation/lm loss": 6.121212, "validation/lm loss PPL": 455.3}


def test_its_names_become_signals(tmp_path: Path) -> None:
    path = tmp_path / "train.log"
    path.write_bytes(LOG)
    records = records_of(path)
    assert [(record.step, record.stride) for record in records] == [(10, 10), (20, 10), (30, 10)]
    assert records[0].signals["skipped"] == 10
    assert (records[1].value("loss"), records[1].value("lr"), records[1].value("samples_seen")) == (
        7.399415,
        1.342e-4,
        320,
    )
    assert records[2].value("nonfinite", "loss") == 2
    assert records[1].signals["num_zeros"] == 0
    assert [event.kind for event in events_of(path)] == ["start", "evaluation"]


def test_older_and_newer_ways_of_writing_are_read() -> None:
    old = b" iteration      100/  320000 | elapsed time per iteration (ms): 520.3 | learning rate 1.500E-04 | lm loss 9.812345E+00 | loss scale 262144.0 |\n"
    rows, _ = rows_of("megatron", old)
    assert rows == [
        {
            "step": 100,
            "step_duration_seconds": 0.5203,
            "learning rate": 1.5e-4,
            "lm loss": 9.812345,
            "loss scale": 262144,
        }
    ]
    new = b"[default7]:\x1b[32m[2025-10-21T16:18:53+08:00]\x1b[0m iteration       51/   20000 | consumed samples:         3264 | elapsed time per iteration (ms): 6049.0/6050.1 | throughput per GPU (TFLOP/s/GPU): 513.3 | lm loss: 1.959154E+00 | grad norm: 30.855 |\n"
    rows, _ = rows_of("megatron", new)
    assert rows[0]["throughput per GPU (TFLOP/s/GPU)"] == 513.3
    assert rows[0]["step_duration_seconds"] == 6.049
    slow = b" iteration        2/   95367 | consumed tokens:      8388608 | elapsed time per iteration (s): 769.99 | lm loss: 6.384045E+01 | samples per second: 2.660 | TFLOPs: 108.47 |\n"
    assert rows_of("megatron", slow)[0][0]["step_duration_seconds"] == 769.99
