"""The receiver passes a request for a quarantined checkpoint on, and takes no such state for a target."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

from tests.receiver.requested import Receiving, id_of
from tests.receiver.supervised import Supervised
from trainwarden.plan import Quarantine, Target
from trainwarden.receiver.restarts import completed_checkpoint
from trainwarden.record import Event, encode_line
from trainwarden.runfolder import QUARANTINED, RunFolder


def test_a_request_is_a_plan_file_and_ends_nothing(running: Supervised, receiving: Receiving) -> None:
    tree = running.tree()
    envelope = receiving.envelope(running.run, "quarantine", for_attempt=0, skip_samples=[], quarantine=_asked())
    assert receiving.send(envelope).status_code == 202
    receiving.wait_for(envelope, "executed")
    [plan] = running.run.read_plans()[0]
    assert plan.action == "quarantine"
    assert plan.quarantine == _asked()
    assert running.tree() == tree
    assert running.run.ledger() is None
    assert receiving.send(envelope).json()["status"] == "duplicate"
    assert receiving.send(receiving.envelope(running.run)).status_code == 202  # it took no fence


def test_a_request_that_asks_for_more_or_comes_too_late_is_refused(running: Supervised, receiving: Receiving) -> None:
    target = Target(attempt=0, step=5, path=str(receiving.checkpoints / "step-5.bin"))
    wrong: list[dict[str, Any]] = [
        {"for_attempt": 0},
        {"for_attempt": 0, "quarantine": _asked(), "target": target},
        {"for_attempt": 0, "quarantine": _asked(incident="../../etc")},
        {"for_attempt": 0, "quarantine": _asked(expires_at="soon")},
    ]
    for fields in wrong:
        assert receiving.send(receiving.envelope(running.run, "quarantine", **fields)).status_code == 400, fields
    later = receiving.envelope(running.run, "quarantine", for_attempt=1, quarantine=_asked())
    assert receiving.send(later).json()["reason"] == "bad_plan"
    late = receiving.envelope(running.run, "quarantine", expires=-1, for_attempt=0, quarantine=_asked())
    assert receiving.send(late, id_of(late, 1)).json()["reason"] == "expired"
    stale = receiving.envelope(running.run, "quarantine", attempt=3, for_attempt=3, quarantine=_asked())
    assert receiving.send(stale).json()["reason"] == "stale"
    assert running.run.read_plans()[0] == []


def test_a_quarantined_state_is_no_target_wherever_it_lies_and_however_it_is_named(
    running: Supervised, receiving: Receiving
) -> None:
    copy = running.run.quarantine_folder / "incident-i"
    (copy / "checkpoint").mkdir(parents=True)
    (copy / QUARANTINED).write_text("{}")
    (copy / "checkpoint" / "state.pt").write_bytes(b"weights")
    (receiving.checkpoints / "link.bin").symlink_to(copy / "checkpoint" / "state.pt")
    shutil.copytree(copy, receiving.checkpoints / "moved")
    here = Target(attempt=0, step=5, path=str(receiving.checkpoints / "step-5.bin"))
    for path in (
        copy / "checkpoint" / "state.pt",
        copy / "checkpoint",
        receiving.checkpoints / "link.bin",
        receiving.checkpoints / "moved" / "checkpoint",
    ):
        named = Target(attempt=0, step=5, path=str(path))
        for fields in ({"target": named}, {"target": here, "fallback_targets": [named]}):
            answer = receiving.send(receiving.envelope(running.run, **fields))
            assert answer.status_code == 409
            assert answer.json()["reason"] == "quarantined_target", answer.json()
    live = running.ask("look").live
    assert (live.attempt, live.phase, live.request_id) == (0, "running", None)
    assert running.run.read_plans()[0] == []


def test_a_supervisor_takes_no_quarantined_state_for_progress(tmp_path: Path) -> None:
    run = RunFolder("toy", tmp_path)
    journal = run.journal(0, "start", 0)
    journal.mkdir(parents=True)
    fields: dict[str, Any] = {"path": "/x", "complete": True}
    for more, progress in (({"quarantined": True}, False), ({}, True)):
        event = Event(kind="checkpoint", time=1.0, seq=1, step=5, fields={**fields, **more})
        (journal / "00001.ndjson").write_bytes(encode_line(event) + b"\n")
        assert completed_checkpoint(run, 0) is progress


def _asked(**changed: Any) -> Quarantine:
    asked: dict[str, Any] = {
        "incident": "toy-0-5",
        "expires_at": "2099-01-01T00:00:00+00:00",
        "suspect_step": 5,
        "last_good": Target(attempt=0, step=4, path="/checkpoints/4"),
    }
    return Quarantine(**{**asked, **changed})
