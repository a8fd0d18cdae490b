"""Text logs of programs that nobody knows, as long as they name their numbers."""

from __future__ import annotations

import pytest

from tests.rules.replay.logs import rows_of
from trainwarden.rules.replay.readers import recognise
from trainwarden.rules.replay.readers.text import parse

LOG = b"""Loading data from /data/v2/train
model: 124.4M parameters, 12 layers
2024-05-01 10:00:01,123 - INFO - Step 1: loss=10.93, lr=1e-06, grad_norm=2.5
2024-05-01 10:00:02,123 - INFO - Step 2: loss=10.51, lr=2e-06, grad_norm=2.4
2024-05-01 10:00:02,500 - INFO - evaluation done in 3 s
2024-05-01 10:00:03,123 - INFO - Step 3: loss=nan, lr=3e-06, grad_norm=inf
"""


def test_lines_with_a_step_and_a_loss_are_read_with_their_time() -> None:
    rows, notices = rows_of("text", LOG)
    assert [row["step"] for row in rows] == [1, 2, 3]
    assert {name: rows[1][name] for name in ("loss", "lr", "grad_norm")} == {
        "loss": 10.51,
        "lr": 2e-06,
        "grad_norm": 2.4,
    }
    assert rows[1]["time"] - rows[0]["time"] == 1.0
    assert repr(rows[2]["loss"]) == "nan"
    assert notices == []


@pytest.mark.parametrize(
    ("line", "wanted"),
    [
        (
            b"INFO:train:step=7 loss=2.5 lr=1e-4 tokens=1,048,576",
            {"step": 7, "loss": 2.5, "lr": 1e-4, "tokens": 1048576},
        ),
        (b"Epoch [1/3], Step [7/60], Loss: 2.5", {"step": 7, "Loss": 2.5}),
        (
            b"Epoch 1 | iter 7 step 2 | loss train: 2.5, val: n/a | iter time: 450.33 ms",
            {"step": 7, "loss train": 2.5, "iter time": 450.33},
        ),
        (b"step 1,007 loss 2.5 lr 1e-4", {"step": 1007, "loss": 2.5, "lr": 1e-4}),
        (b"iteration 7/100 | train loss = 2.5 | mem 31.2GiB | 57.1% busy", {"step": 7, "train loss": 2.5}),
        (b"[rank0] global_step: 7 | val loss: 2.5", {"step": 7, "val loss": 2.5}),
        (b"step time: 0.7 s, loss 2.5", None),
        (b"saved step 7 to /ckpt/loss/7.pt", None),
        (b"1.3 steps/s, loss: 2.5", None),
    ],
)
def test_the_ways_in_which_programs_write_a_line(line: bytes, wanted: dict[str, float] | None) -> None:
    found = parse(line)
    assert (found and {name: value for name, value in found.items() if name not in ("Epoch", "mem")}) == wanted


def test_a_known_program_is_known_better() -> None:
    for log, format in (
        (b"iter 1: loss 9.8, time 340.00ms, mfu 3.2%\niter 2: loss 9.8, time 340.00ms, mfu 3.2%\n", "nanogpt"),
        (b"step 1/9 | loss 8.9 (+1.2z)| norm 2.0 (-0.3z)\nstep 2/9 | loss 8.9 (+1.2z)| norm 2.0 (-0.3z)\n", "llmc"),
    ):
        assert recognise(log, "x.log") == format
    assert recognise(b"step 1 began\nsome loss of data\nstep 2 began\n", "x.log") is None
