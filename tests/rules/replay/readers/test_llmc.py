"""llm.c: what it prints, and its main.log."""

from __future__ import annotations

import math
from pathlib import Path

from tests.rules.replay.logs import events_of, records_of, rows_of

PRINTED = b"""+-----------------------+----------------------------------------------------+
| max_sequence_length T | 1024                                               |
val loss 11.009956
step    1/18865 | loss 11.010157 (+nanz)| norm 15.3418 (+nanz)| lr 8.57e-07 | 5002.51 ms | 49.3% bf16 MFU | 104807 tok/s
step    2/18865 | loss 10.966536 (-1.20z)| norm 15.2222 (-0.71z)| lr 1.71e-06 | 2871.27 ms | 56.1% bf16 MFU | 182595 tok/s
step    3/18865 | loss nan (+nanz)| norm nan (+nanz)| lr 2.57e-06 | 2871.27 ms | 56.1% bf16 MFU | 182595 tok/s
"""
LOGGED = b"s:0 tel:11.0100\ns:0 trl:11.0102 lr:0.000001 norm:15.34\ns:1 trl:10.9665 lr:0.000002 norm:15.22\ns:1 eval:0.2463\n"


def test_what_it_prints_counts_from_one() -> None:
    rows, notices = rows_of("llmc", PRINTED)
    assert notices == []
    assert rows[0] == {"step": 1, "loss": 11.010157, "grad_norm": 15.3418, "lr": 8.57e-07}
    assert math.isnan(rows[2]["loss"])
    assert math.isnan(rows[2]["grad_norm"])


def test_its_log_counts_from_zero_and_keeps_its_numbers(tmp_path: Path) -> None:
    path = tmp_path / "main.log"
    path.write_bytes(LOGGED)
    first, second = records_of(path)
    assert first.step == 0
    assert first.signals == {"val_loss": 11.01, "loss": 11.0102, "lr": 0.000001, "grad_norm": 15.34}
    assert (second.step, second.signals["eval_accuracy"]) == (1, 0.2463)
    assert [event.kind for event in events_of(path)] == ["start", "evaluation", "evaluation"]


def test_trainers_made_after_it_are_read() -> None:
    python = b"step   13/20000 | train loss 8.961234 | norm 2.0123 | lr 1.00e-04 | (340.12 ms | 48000 tok/s)\n"
    assert rows_of("llmc", python)[0] == [{"step": 13, "loss": 8.961234, "grad_norm": 2.0123, "lr": 1e-4}]
    chat = b"step 00012/21400 (0.06%) | loss: 9.870000 | grad norm: 1.2000 | lrm: 1.00 | dt: 1000.00ms | tok/sec: 524,288 | mfu: 48.00\n"
    (row,) = rows_of("llmc", chat)[0]
    assert (row["step"], row["loss"], row["grad norm"]) == (12, 9.87, 1.2)
