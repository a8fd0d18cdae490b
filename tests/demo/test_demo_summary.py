"""The demo's arithmetic: what it counts, what it promises, what it says when it does not keep it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from trainwarden.demo.layout import DemoError, prepare
from trainwarden.demo.main import main
from trainwarden.demo.screen import Screen
from trainwarden.demo.summary import broken_promises, contains, count

GOOD: dict[str, Any] = {
    "clean_loss": 2.0,
    "untreated_loss": 2.2,
    "treated_loss": 2.01,
    "incidents": 1,
    "rollbacks": 1,
    "onset_step": 353,
    "poison_first_step": 353,
    "verdict": "divergence",
    "cause": "data",
    "skip_samples": 400,
    "poison_samples": 400,
    "contains": True,
    "plan_applied": True,
    "recovered": True,
    "seconds": 100.0,
    "state": "recovered",
}


def test_what_the_demo_promises_is_kept_by_a_good_run() -> None:
    assert broken_promises(GOOD) == []


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"rollbacks": 2}, "one rollback (there were 2)"),
        ({"rollbacks": 0, "skip_samples": 0}, "one rollback (there were 0)"),
        ({"cause": "optimizer_state"}, "cause data (it was optimizer_state)"),
        ({"contains": False}, "every poisoned sample is skipped"),
        ({"plan_applied": False}, "the plan was applied"),
        ({"recovered": False, "state": "inconclusive"}, "the run recovered (the incident is inconclusive)"),
        ({"skip_samples": 1601}, "at most 4 times"),
        ({"onset_step": 357}, "the onset is found within 3 steps of step 353 (it was 357)"),
        ({"onset_step": None}, "the onset is found within 3 steps"),
        ({"treated_loss": 2.05}, "within 2% of the clean one (+2.5%)"),
        ({"untreated_loss": 2.09}, "at least 5% above the clean one (+4.5%)"),
    ],
)
def test_a_broken_promise_is_named_with_its_number(change: dict[str, Any], says: str) -> None:
    broken = broken_promises(GOOD | change)
    assert any(says in sentence for sentence in broken), broken


def test_positions_are_counted_once_and_contained_over_touching_ranges() -> None:
    assert count([(0, 10), (5, 20)]) == 20
    assert contains([(0, 10), (10, 20)], [(5, 15)])
    assert not contains([(0, 10), (11, 20)], [(5, 15)])
    assert not contains([], [(5, 15)])
    assert contains([(5, 15)], [])


def test_a_folder_that_no_demo_wrote_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "thesis.txt").write_text("ten years of work")
    with pytest.raises(DemoError, match="choose another folder"):
        prepare(tmp_path)
    assert (tmp_path / "thesis.txt").read_text() == "ten years of work"


def test_a_folder_of_an_earlier_demo_is_emptied(tmp_path: Path) -> None:
    layout = prepare(tmp_path / "demo")
    layout.summary.write_text("{}")
    assert not prepare(tmp_path / "demo").summary.exists()


def test_the_command_says_what_is_wrong_and_fails(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "thesis.txt").write_text("ten years of work")
    assert main(["--dir", str(tmp_path)]) == 1
    assert "holds files that no demo wrote" in " ".join(capsys.readouterr().out.split())


def test_without_a_terminal_the_story_is_plain_lines(capsys: pytest.CaptureFixture[str]) -> None:
    with Screen(Console(force_terminal=False, width=100)) as screen:
        for step in (10, 120, 250, 260, 340):
            screen.progress("clean", step, 640, 2.5)
        screen.say("daemon", "incident [bold] of brackets", loud=True)
    said = capsys.readouterr().out.splitlines()
    assert [line.split("step ")[1] for line in said[:-1]] == [
        "120 of 640, loss 2.500",
        "250 of 640, loss 2.500",
        "340 of 640, loss 2.500",
    ]
    assert "incident [bold] of brackets" in said[-1]
    assert "\x1b" not in "".join(said)
