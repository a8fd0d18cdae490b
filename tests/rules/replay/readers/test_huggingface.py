"""trainer_state.json of Hugging Face's Trainer."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

from tests.rules.replay.logs import events_of, read_rows, records_of, rows_of

STATE: dict[str, Any] = {
    "best_metric": None,
    "epoch": 0.12,
    "eval_steps": 20,
    "global_step": 30,
    "is_local_process_zero": True,
    "log_history": [
        {"epoch": 0.04, "grad_norm": 1.52, "learning_rate": 2e-05, "loss": 2.0751, "step": 10},
        {"epoch": 0.08, "grad_norm": float("nan"), "learning_rate": 2e-05, "loss": 0.0, "step": 20},
        {"epoch": 0.08, "eval_loss": 1.9, "eval_runtime": 3.2, "eval_samples_per_second": 30.1, "step": 20},
        {"epoch": 0.12, "grad_norm": 1.48, "learning_rate": 1.9e-05, "loss": 1.9, "step": 30},
        {"epoch": 0.12, "step": 30, "total_flos": 1e17, "train_loss": 1.3, "train_runtime": 88.1},
    ],
    "logging_steps": 10,
    "max_steps": 30,
    "stateful_callbacks": {"TrainerControl": {"args": {"should_log": False}, "attributes": {}}},
    "total_flos": 1e17,
}


def test_the_log_history_is_read_and_the_summary_is_not(tmp_path: Path) -> None:
    path = tmp_path / "trainer_state.json"
    path.write_text(json.dumps(STATE, indent=2))
    records = records_of(path)
    assert [(record.step, record.stride, record.value("loss")) for record in records] == [
        (10, 10, 2.0751),
        (20, 10, 0.0),
        (30, 10, 1.9),
    ]
    assert math.isnan(records[1].value("grad_norm") or 0)
    assert records[1].signals["eval_loss"] == 1.9
    assert records[0].signals["lr"] == 2e-5
    assert [event.kind for event in events_of(path)] == ["start", "evaluation"]


def test_a_torn_document_gives_the_entries_before_the_tear() -> None:
    whole = json.dumps(STATE, indent=2).encode()
    assert rows_of("huggingface", whole)[1] == []
    expected, _ = rows_of("huggingface", whole)
    start = whole.index(b'"log_history"') + 14
    for cut in range(start, whole.index(b'"logging_steps"'), 7):
        rows, notices = read_rows("huggingface", whole[:cut])
        assert len(rows) <= len(expected)
        assert repr(rows) == repr(expected[: len(rows)])
        assert [row["kind"] for row in notices] == ["torn"]
    assert len(read_rows("huggingface", whole[: whole.index(b'"epoch": 0.12', start)])[0]) == 3


def test_a_document_without_history_gives_nothing() -> None:
    assert read_rows("huggingface", b'{"log_history": null}') == ([], [])
    assert read_rows("huggingface", b"[1]") == ([], [])
