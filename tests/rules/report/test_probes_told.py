"""What pages and text say of a probe, its answer, and of checkpoints that are too rare."""

from __future__ import annotations

import io
from typing import Any

import pytest
from rich.console import Console

from trainwarden.rules.report import words
from trainwarden.rules.report.dossier import dossier
from trainwarden.rules.report.terminal import _incident

PLAN: dict[str, Any] = {
    "action": "probe",
    "target": {"attempt": 0, "step": 300, "path": "c/300"},
    "probe": {"kind": "replay", "first_step": 350, "steps": 22, "samples": [[5584, 5616]], "epoch": 0},
    "reasons": {"probe": "If step 351 goes wrong again it is the data."},
}
ROW: dict[str, Any] = {"id": "inc_1", "action": "probe", "state": "verifying", "severity": "warning", "plan": PLAN}


def test_the_decision_says_what_is_tried_and_what_it_would_tell() -> None:
    says = words.decision(ROW)
    assert says.startswith(
        "Decided: a probe from the checkpoint of step 300: the same samples again, steps 350 to 371."
    )
    assert says.endswith("If step 351 goes wrong again it is the data.")
    assert words.decision({"action": "probe", "plan": None}) == "Decided: a probe."
    assert "without any evaluation" in words.probe_of({"probe": {"kind": "without_evaluation"}})
    assert words.probe_of({"probe": "garbled"}) == words.probe_of({}) == ""


@pytest.mark.parametrize(
    ("answer", "says"),
    [("again", "it came again"), ("passed", "it passed"), ("unclear", "does not tell"), (None, "ran")],
)
def test_a_report_says_the_answer(answer: str | None, says: str) -> None:
    found = dossier({**ROW, "verification": {"attempt": 1, "answer": answer, "checks": {}, "windows": []}})
    assert says in found.verified
    assert [(value, why) for name, value, why in found.plan if name == "probe"] == [
        ("the same samples again, steps 350 to 371", "If step 351 goes wrong again it is the data.")
    ]


def test_the_text_has_the_advice_on_checkpoints() -> None:
    console = Console(file=io.StringIO(), width=200)
    _incident({**ROW, "advice": ["Checkpoints are too rare."]}, console, attempts=False, timeline=True)
    assert isinstance(console.file, io.StringIO)
    assert "→ Checkpoints are too rare." in console.file.getvalue()
