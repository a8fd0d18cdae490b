"""The story on the screen: a cause stands above its effect, lines can be copied, nothing trails."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from trainwarden.demo.follow import Daemon, Receiver
from trainwarden.demo.layout import Layout, shown, size
from trainwarden.demo.main import _close
from trainwarden.demo.processes import typed
from trainwarden.demo.screen import HOLD, Screen
from trainwarden.demo.story import IncidentStory

REQUEST = "tw_1"
SUMMARY: dict[str, Any] = {
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
    "skip_ranges": [(2800, 3200)],
    "poison_ranges": [(2800, 3200)],
    "contains": True,
    "plan_applied": True,
    "recovered": True,
    "seconds": 100.0,
    "state": "recovered",
    "target_step": 350,
    "step": 640,
}


def words(text: str) -> list[str]:
    return [line[17:] for line in text.splitlines()]


class SaidDaemon(Daemon):
    def __init__(self, timeline: list[dict[str, Any]]) -> None:
        self.timeline = timeline

    def incidents(self) -> list[dict[str, Any]]:
        return [{"id": "inc_1", "state": "acting", "webhook_id": REQUEST, "timeline": self.timeline, "alerts": ["A"]}]


class SaidReceiver(Receiver):
    def __init__(self, *answers: dict[str, Any]) -> None:
        self.answers = list(answers)

    def status(self, request_id: str) -> dict[str, Any] | None:
        return self.answers.pop(0) if self.answers else None


def test_a_line_that_comes_in_late_is_told_where_its_time_belongs(capsys: pytest.CaptureFixture[str]) -> None:
    now = time.time()
    with Screen(Console(force_terminal=False, width=100)) as screen:
        screen.say("trainer", "the effect", at=now + 0.9)
        screen.say("daemon", "the cause", at=now + 0.4)
        screen.beat()
        assert capsys.readouterr().out == ""
    assert words(capsys.readouterr().out) == ["the cause", "the effect"]


def test_a_line_is_held_back_for_the_window_and_no_longer(capsys: pytest.CaptureFixture[str]) -> None:
    now = time.time()
    with Screen(Console(force_terminal=False, width=100)) as screen:
        screen.say("trainer", "long ago", at=now - HOLD - 1)
        screen.say("trainer", "just now", at=now)
        screen.beat()
        assert words(capsys.readouterr().out) == ["long ago"]


def test_the_request_and_its_answer_stand_above_the_end_of_the_attempt(capsys: pytest.CaptureFixture[str]) -> None:
    now = 1_795_968_915.0
    stamp = "2026-11-29T16:15:15.65+00:00"
    timeline = [
        {"time": now + 0.5, "step": 354, "state": "acting", "says": f"The rollback is requested ({REQUEST})."},
        {"time": now + 0.7, "step": None, "state": "acting", "says": "The receiver says accepted."},
    ]
    with Screen(Console(force_terminal=False, width=100)) as screen:
        screen.say("trainer", "attempt 0 ended", at=now + 0.95)
        receiver = SaidReceiver({"status": "accepted", "updated": stamp})
        IncidentStory(screen, SaidDaemon(timeline), receiver).tell()
    assert words(capsys.readouterr().out) == [
        "opens incident inc_1",
        f"step 354, acting: The rollback is requested ({REQUEST}).",
        f"webhook {REQUEST}: signature, age, fence, target checked",
        "accepted",
        "acting: The receiver says accepted.",
        "attempt 0 ended",
    ]


def test_a_request_first_seen_when_it_is_done_was_checked_when_it_was_sent(capsys: pytest.CaptureFixture[str]) -> None:
    timeline = [
        {"time": 1_795_968_915.5, "step": 354, "state": "acting", "says": f"The rollback is requested ({REQUEST})."},
        {"time": 1_795_968_916.0, "step": None, "state": "acting", "says": "The receiver says accepted."},
    ]
    with Screen(Console(force_terminal=False, width=100)) as screen:
        receiver = SaidReceiver({"status": "executed", "detail": "up", "updated": "2026-11-29T16:15:19+00:00"})
        IncidentStory(screen, SaidDaemon(timeline), receiver).tell()
    said = words(capsys.readouterr().out)
    assert [line.partition(":")[0] for line in said[2:]] == [f"webhook {REQUEST}", "acting", "executed"]


def test_the_end_can_be_copied_and_nothing_trails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    layout = Layout(tmp_path / ("a-folder-with-a-rather-long-name-" * 4) / ".demo")
    layout.ops.mkdir(parents=True)
    (layout.ops / "daemon.log").write_bytes(b"x" * 3_000_000)
    with Screen(Console(force_terminal=False, width=100)) as screen:
        screen.title("1. First")
        screen.say("daemon", "word " * 60)
        assert _close(screen, layout, SUMMARY) == 0
    said = capsys.readouterr().out
    lines = said.splitlines()
    assert [line for line in lines if line != line.rstrip()] == []
    run = shown(layout.run_folder("treated").path)
    assert not run.startswith("/")
    assert f"  {typed('replay', run)}" in lines
    assert sum(line.endswith(f"  {run}") for line in lines) == 1
    assert f"({size(layout.root) / 1e6:.0f} MB):" in said
    for heading in ("3. What came of it", "Loss on held-out", "The incident", "To look at", "To have the recorded"):
        (at,) = [number for number, line in enumerate(lines) if line.startswith(heading)]
        assert lines[at - 1] == "", heading
