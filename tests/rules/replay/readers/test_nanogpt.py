"""nanoGPT's text log and those of its children."""

from __future__ import annotations

from pathlib import Path

from tests.rules.replay.logs import events_of, records_of, rows_of

LOG = b"""tokens per iteration will be: 491,520
number of parameters: 123.59M
step 0: train loss 10.9885, val loss 10.9898
iter 0: loss 10.9886, time 51453.24ms, mfu -100.00%
iter 10: loss 9.8012, time 340.00ms, mfu 38.21%
iter 20: loss nan, time 340.00ms, mfu 38.21%
saving checkpoint to out
"""


def test_iterations_and_evaluations(tmp_path: Path) -> None:
    rows, notices = rows_of("nanogpt", LOG)
    assert notices == []
    assert rows[:2] == [
        {"step": 0, "eval/train_loss": 10.9885, "val/loss": 10.9898},
        {"step": 0, "loss": 10.9886, "step_duration_seconds": 51.45324, "mfu_percent": -100.0},
    ]
    path = tmp_path / "out.txt"
    path.write_bytes(LOG)
    records = records_of(path)
    assert [(record.step, record.stride) for record in records] == [(0, 10), (10, 10), (20, 10)]
    assert records[0].signals["val_loss"] == 10.9898
    (_, evaluation) = events_of(path)
    assert evaluation.fields == {"eval/train_loss": 10.9885, "val/loss": 10.9898}


def test_modded_nanogpt() -> None:
    log = b"step:0/6200 val_loss:10.8258 train_time:0ms step_avg:nanms\nstep:1/6200 train_loss:10.8258 train_time:120ms step_avg:120.00ms\n"
    assert rows_of("nanogpt", log)[0] == [{"step": 0, "val_loss": 10.8258}, {"step": 1, "train_loss": 10.8258}]


def test_build_nanogpt() -> None:
    log = b"0 val 10.9511\n0 hella 0.2463\n0 train 10.955029\n1 train 10.612345\n"
    rows, _ = rows_of("nanogpt", log)
    assert rows == [
        {"step": 0, "val/loss": 10.9511},
        {"step": 0, "eval/hellaswag": 0.2463},
        {"step": 0, "loss": 10.955029},
        {"step": 1, "loss": 10.612345},
    ]


def test_children_add_rate_and_norm() -> None:
    log = b"iter 10: loss 10.5924, grad_norm 2.0571, lr 6.00e-05, time 104.0ms\niter 20: loss 6.5\n"
    assert rows_of("nanogpt", log)[0] == [
        {"step": 10, "loss": 10.5924, "grad_norm": 2.0571, "lr": 6e-5, "step_duration_seconds": 0.104},
        {"step": 20, "loss": 6.5},
    ]
