"""A copy that takes its time, a run that ends meanwhile, and what another rank is told."""

from __future__ import annotations

import json
from concurrent.futures import Future
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from tests.exporter.quarantines import Run, ask, copy_of, outcome, trained_for
from tests.exporter.runs import events
from tests.real import wait_until
from trainwarden.exporter.forensics import Forensics, load
from trainwarden.exporter.notices import Notices
from trainwarden.runfolder import write_whole


def test_the_future_of_an_asynchronous_save_is_waited_for_and_its_failure_is_the_copys(tmp_path: Path) -> None:
    run = Run(tmp_path)
    pending: list[Future[None]] = []

    def save(path: Path) -> Future[None]:
        pending.append(Future())
        run.save(path)
        return pending[-1]

    run.exporter.forensics(save)
    run.step(5)
    ask(tmp_path)
    wait_until(lambda: run.step() or pending, 30)
    trained_for(run, 1.0)
    assert not copy_of(tmp_path).exists()
    pending[0].set_result(None)
    run.step_until(copy_of(tmp_path) / "WHOLE")
    ask(tmp_path, "run-0-9")
    wait_until(lambda: run.step() or len(pending) == 2, 30)
    pending[1].set_exception(OSError("the store is away"))
    assert outcome(tmp_path, "run-0-9")["error"] == "OSError: the store is away"
    run.exporter.close()


def test_a_run_that_ends_right_after_the_save_still_completes_the_copy(tmp_path: Path) -> None:
    run = Run(tmp_path)
    saved: list[int] = []

    def save(path: Path) -> None:
        saved.append(run.exporter.global_step)
        run.save(path)

    run.exporter.forensics(save)
    run.step(5)
    ask(tmp_path)
    wait_until(lambda: run.step() or saved, 30)
    run.exporter.close()
    assert load(copy_of(tmp_path)).positions.steps[-1].step == saved[0]
    assert [event for event in events(tmp_path, "checkpoint") if event.fields.get("quarantined")]


def test_a_run_that_ends_before_the_named_step_leaves_nothing_behind(tmp_path: Path) -> None:
    run = Run(tmp_path)
    run.exporter.forensics(run.save)
    run.step(5)
    ask(tmp_path)
    partial = copy_of(tmp_path).with_name("incident-run-0-5.partial")
    wait_until(partial.exists, 30)
    run.exporter.close()
    assert not list(partial.parent.iterdir())


@pytest.mark.parametrize("how", ["true", "open to others", "garbled", "of another start", "a link"])
def test_another_rank_joins_in_what_rank_0_of_its_own_start_has_named_and_in_nothing_else(
    tmp_path: Path, how: str
) -> None:
    run = Run(tmp_path)
    run.step(5)
    parts = run.exporter._parts
    assert parts is not None
    beside = SimpleNamespace(
        identity=replace(parts.identity, rank=1, world_size=2),
        folder=parts.folder,
        watched=parts.watched,
        recorder=parts.recorder,
        reports=parts.reports,
    )
    other = Forensics(
        run.save, 2, 8, beside, [run.optimizer], Notices(), lambda: run.exporter.global_step, run.exporter.phase
    )
    quarantine = parts.folder.quarantine_folder
    (quarantine / "incident-i.partial").mkdir(parents=True)
    request = {"incident": "i", "expires_at": "2099-01-01T00:00:00+00:00", "suspect_step": 1}
    start_id = "another" if how == "of another start" else parts.identity.start_id
    line = json.dumps({"start_id": start_id, "number": 0, "step": 9, "request": request}).encode()
    proposal = quarantine / "proposal.json"
    write_whole(tmp_path / "aside" if how == "a link" else proposal, line[:-1] if how == "garbled" else line)
    if how == "a link":
        proposal.symlink_to(tmp_path / "aside")
    if how == "open to others":
        proposal.chmod(0o666)
    other._look()
    assert (other.armed == 9) == (how == "true")
    assert (quarantine / "incident-i.partial" / "agree-0-rank-1").exists() == (how == "true")
    run.exporter.close()
