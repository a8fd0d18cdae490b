"""A damaged state is kept when it is asked for, whole or not at all; it is no checkpoint, and the run goes on as if nobody had asked."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.exporter.quarantines import Run, ask, copy_of, good, kept, outcome, trained_for
from tests.exporter.runs import events, lines
from tests.exporter.seams import Watch
from tests.real import wait_until
from trainwarden.exporter import Exporter
from trainwarden.exporter.checkpoints import catalogue
from trainwarden.exporter.forensics import ForensicsError, load
from trainwarden.exporter.resume import Resume
from trainwarden.plan import Plan, Target
from trainwarden.record import Step
from trainwarden.runfolder import RunFolder, in_quarantine

ROOT = Path(__file__).resolve().parents[2]


def test_a_request_leaves_a_whole_copy_of_one_steps_state_and_what_the_steps_before_it_ate(tmp_path: Path) -> None:
    run = Run(tmp_path)
    run.exporter.forensics(run.save, batches=8)
    run.step(20)
    copy = kept(run, suspect_step=18)
    run.step(3)
    run.exporter.close()
    assert run.exporter.notices == []
    found = load(copy)
    records = {line.step: line for line in lines(tmp_path) if isinstance(line, Step)}
    assert found.suspect_step == 18
    assert found.step >= 20
    assert [seen.step for seen in found.positions.steps] == list(range(found.step - 7, found.step + 1))
    for seen in found.positions.steps:
        record = records[seen.step]
        assert (seen.samples, seen.shards) == (record.samples, record.shards)
        assert seen.number("loss") == record.value("loss") == run.losses[seen.step]
        assert seen.number("grad_norm") == record.value("grad_norm")
        assert seen.batch_hash == record.value("batch_hash") is not None
    state = torch.load(found.checkpoint / "state.pt", weights_only=True)
    assert state["step"] == found.step
    [event] = list(events(tmp_path, "checkpoint"))
    assert event.step == found.step
    assert event.fields["path"] == str((copy / "checkpoint").absolute())
    assert event.fields["quarantined"] is True
    assert "complete" not in event.fields
    entered = [event.fields["phase"] for event in events(tmp_path, "phase")]
    assert entered == ["checkpoint", "train"]
    assert outcome(tmp_path) == {"incident": "run-0-5", "saved": True, "step": found.step, "error": None}


def test_the_page_does_not_count_it_as_the_newest_checkpoint(tmp_path: Path) -> None:
    run = Run(tmp_path)
    run.exporter.forensics(run.save)
    run.step(3)
    run.checkpoint()
    run.step(2)
    kept(run)
    assert run.exporter._parts is not None
    page = run.exporter._parts.page
    run.exporter.close()
    [family] = [family for family in page.collect() if family.name == "train_checkpoint_last_step"]
    assert [sample.value for sample in family.samples] == [3.0]


def test_nothing_chooses_it_as_a_target_and_a_plan_that_names_it_is_refused(tmp_path: Path) -> None:
    run = Run(tmp_path)

    def save(path: Path) -> None:
        run.save(path)
        run.exporter.checkpoint(run.exporter.global_step, path / "state.pt")  # what a function that saves does by habit

    run.exporter.forensics(save)
    run.step(5)
    last = run.checkpoint()
    run.step(5)
    copy = kept(run)
    run.exporter.close()
    folder = RunFolder("run", tmp_path)
    usable = [one for one in catalogue(folder) if not one.quarantined]
    assert [(one.step, one.path) for one in usable] == [(5, str(last.absolute()))]
    target = Resume.read(folder, 1).target
    assert target is not None
    assert target.path == str(last.absolute())
    identity = folder.identity()
    assert identity is not None
    state = copy / "checkpoint" / "state.pt"
    elsewhere = tmp_path / "link.pt"
    elsewhere.symlink_to(state)
    moved = shutil.copytree(copy, tmp_path / "moved") / "checkpoint" / "state.pt"
    for number, path in enumerate((state, copy / "checkpoint", elsewhere, moved)):
        assert in_quarantine(path)
        rollback = Plan(
            plan_id=f"p{number}",
            run_uid=identity.run_uid,
            for_attempt=1,
            target=Target(attempt=0, step=10, path=str(path)),
        )
        written = folder.write_plan(rollback)
        plans, refused = folder.read_plans()
        assert all(plan.action == "quarantine" for plan in plans)
        assert any("kept in quarantine" in sentence and written.name in sentence for sentence in refused)
        resume = Resume.read(folder, 1)
        assert resume.plan is None
        assert resume.target is not None
        assert resume.target.path == str(last.absolute())
        fallback = Plan(
            plan_id=f"f{number}",
            run_uid=identity.run_uid,
            for_attempt=1,
            target=good(last, 5),
            fallback_targets=[Target(attempt=0, step=10, path=str(path))],
        )
        other = folder.write_plan(fallback)
        assert all(plan.action == "quarantine" for plan in folder.read_plans()[0])
        written.unlink()
        other.unlink()
    assert not in_quarantine(last)


def test_a_save_that_raises_costs_the_copy_and_nothing_else(tmp_path: Path) -> None:
    run = Run(tmp_path)

    def save(path: Path) -> None:
        run.save(path)
        raise RuntimeError("the disk is on fire")

    run.exporter.forensics(save)
    run.step(5)
    ask(tmp_path)
    run.step_until(copy_of(tmp_path).with_name("incident-run-0-5.json"))
    run.step(3)
    run.exporter.close()
    assert [notice for notice in run.exporter.notices if "the disk is on fire" in notice]
    assert outcome(tmp_path)["error"] == "RuntimeError: the disk is on fire"
    assert [entry.name for entry in copy_of(tmp_path).parent.iterdir()] == ["incident-run-0-5.json"]
    [event] = events(tmp_path, "checkpoint")
    assert event.fields["complete"] is False
    assert event.fields["quarantined"] is True
    assert "on fire" in event.fields["error"]
    assert Resume.read(RunFolder("run", tmp_path), 1).target is None


def test_a_function_that_writes_nothing_makes_no_copy(tmp_path: Path) -> None:
    run = Run(tmp_path)
    run.exporter.forensics(lambda path: None)
    run.step(5)
    ask(tmp_path)
    run.step_until(copy_of(tmp_path).with_name("incident-run-0-5.json"))
    run.exporter.close()
    assert "wrote nothing" in outcome(tmp_path)["error"]
    assert not copy_of(tmp_path).exists()


def test_the_run_goes_on_bit_for_bit_as_if_nobody_had_asked(tmp_path: Path) -> None:
    def losses(folder: Path, asked: bool) -> dict[int, float]:
        run = Run(folder)

        def save(path: Path) -> None:
            torch.rand(5)  # a function that draws
            run.save(path)

        run.exporter.forensics(save)
        run.step(10)
        if asked:
            copy = kept(run)
            assert load(copy).step < 200
        run.step(210 - run.exporter.global_step)
        run.exporter.close()
        return run.losses

    assert losses(tmp_path / "asked", True) == losses(tmp_path / "not", False)


def test_without_the_trainers_word_a_request_does_nothing(tmp_path: Path) -> None:
    run = Run(tmp_path)
    run.step(5)
    ask(tmp_path)
    run.step(300)
    run.exporter.close()
    assert not RunFolder("run", tmp_path).quarantine_folder.exists()
    assert run.exporter.notices == []


@pytest.mark.parametrize("how", ["open to others", "of another run", "garbled", "of another attempt", "with a target"])
def test_a_forged_request_is_not_obeyed(tmp_path: Path, how: str) -> None:
    run = Run(tmp_path)
    run.exporter.forensics(run.save)
    run.step(5)
    if how == "of another attempt":
        ask(tmp_path, attempt=1)
    elif how == "of another run":
        ask(tmp_path, run_uid="another")
    else:
        path = ask(tmp_path, "../../etc" if how == "garbled" else "run-0-5", plan_id="forged")
        if how == "open to others":
            path.chmod(0o644)
        elif how == "with a target":
            raw = json.loads(path.read_bytes())
            raw["target"] = {"attempt": 0, "step": 3, "path": "/x"}
            path.write_text(json.dumps(raw))
        else:
            path.write_bytes(path.read_bytes() + b"}")
    trained_for(run, 1.5)
    kept(run, "true", plan_id="true")
    run.exporter.close()
    left = sorted(entry.name for entry in copy_of(tmp_path).parent.iterdir())
    assert left == ["incident-true", "incident-true.json"]
    if how != "of another attempt":
        assert [notice for notice in run.exporter.notices if "plan refused" in notice]


@pytest.mark.parametrize(
    ("fields", "says"),
    [({"seconds": -1}, "expired"), ({"suspect_step": 10**6}, "has gone back behind step 1000000")],
)
def test_a_request_that_comes_too_late_is_said_and_not_obeyed(
    tmp_path: Path, fields: dict[str, Any], says: str
) -> None:
    run = Run(tmp_path)
    run.exporter.forensics(run.save)
    run.step(5)
    ask(tmp_path, **fields)
    run.step_until(copy_of(tmp_path).with_name("incident-run-0-5.json"))
    run.exporter.close()
    assert says in outcome(tmp_path)["error"]
    assert not copy_of(tmp_path).exists()
    assert [notice for notice in run.exporter.notices if says in notice]


def test_a_request_that_is_repeated_is_done_once(tmp_path: Path) -> None:
    run = Run(tmp_path)
    saved: list[Path] = []

    def save(path: Path) -> None:
        saved.append(path)
        run.save(path)

    run.exporter.forensics(save)
    run.step(5)
    first = load(kept(run)).step
    ask(tmp_path, plan_id="again")
    kept(run, "run-0-9")
    run.exporter.close()
    assert len(saved) == 2
    assert load(copy_of(tmp_path)).step == first


def test_what_was_asked_of_an_earlier_start_is_not_saved_by_a_later_one_of_the_same_attempt(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TRAINWARDEN_ATTEMPT", "0")
    run = Run(tmp_path)
    run.step(5)
    ask(tmp_path)
    again = Run(tmp_path)
    assert again.exporter.attempt == run.exporter.attempt == 0
    again.exporter.forensics(again.save)
    trained_for(again, 1.5)
    kept(again, "run-0-9", attempt=again.exporter.attempt)
    run.exporter.close()
    again.exporter.close()
    assert not copy_of(tmp_path).exists()


def test_no_more_copies_than_the_trainer_allows_lie_there(tmp_path: Path) -> None:
    run = Run(tmp_path)
    run.exporter.forensics(run.save, keep=1)
    run.step(5)
    copy = kept(run)
    ask(tmp_path, "run-0-9")
    run.step_until(copy_of(tmp_path, "run-0-9").with_name("incident-run-0-9.json"))
    assert "keep=1" in outcome(tmp_path, "run-0-9")["error"]
    assert copy.is_dir()
    assert not copy_of(tmp_path, "run-0-9").exists()
    copy.rename(tmp_path / "looked at")
    kept(run, "run-0-11")
    run.exporter.close()


def test_a_half_written_copy_of_a_killed_run_is_never_taken_for_whole(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(
        f"""
import os, signal, sys
from pathlib import Path
from tests.exporter.quarantines import Run
run = Run(Path({str(tmp_path)!r}))
def save(path):
    run.save(path)
    os.kill(os.getpid(), signal.SIGKILL)
run.exporter.forensics(save)
while True:
    run.step()
    print(run.exporter.global_step, flush=True)
"""
    )
    process = subprocess.Popen([sys.executable, str(script)], cwd=ROOT, env=_path(), stdout=subprocess.DEVNULL)
    folder = RunFolder("run", tmp_path)
    wait_until(lambda: len(lines(tmp_path)) > 20, 60, what="it trains")
    ask(tmp_path)
    assert process.wait(60) == -9
    [left] = [entry for entry in folder.quarantine_folder.iterdir() if entry.is_dir()]
    assert left.name == "incident-run-0-5.partial"
    assert (left / "checkpoint" / "state.pt").exists()
    with pytest.raises(ForensicsError, match="never completed"):
        load(left)
    assert in_quarantine(left / "checkpoint" / "state.pt")
    assert Resume.read(folder, 1).target is None
    (renamed := left.with_name("incident-run-0-5")).parent.mkdir(exist_ok=True)
    left.rename(renamed)  # by somebody who believes it to be whole
    with pytest.raises(ForensicsError, match="never completed"):
        load(renamed)
    renamed.rename(left)
    run = Run(tmp_path)
    run.exporter.forensics(run.save)
    run.step(5)
    kept(run, "run-0-9", attempt=run.exporter.attempt)
    run.exporter.close()
    assert not left.exists()


def _path() -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}


@pytest.fixture
def small_disk(tmp_path: Path) -> Any:
    """A file system of 1 MB."""
    place = tmp_path / "disk"
    place.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1m", "none", str(place)], capture_output=True)
    if mounted.returncode:
        pytest.skip("mounting a small tmpfs needs root")
    yield place
    subprocess.run(["umount", "-l", str(place)], check=True)


@pytest.mark.parametrize("when", ["before", "during"])
def test_a_full_disk_costs_the_copy_and_nothing_else(
    tmp_path: Path, small_disk: Path, when: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = Run(tmp_path)
    RunFolder("run", tmp_path).quarantine_folder.symlink_to(small_disk)
    called: list[Path] = []

    def save(path: Path) -> None:
        called.append(path)
        torch.save({**run.state(), "ballast": torch.zeros(2**20)}, path / "state.pt")

    if when == "during":
        monkeypatch.setattr("trainwarden.exporter.forensics.ROOM", 0)
        monkeypatch.setattr("trainwarden.exporter.forensics.REST_BYTES", 0)
    run.exporter.forensics(save)
    run.step(5)
    ask(tmp_path)
    run.step_until(small_disk / "incident-run-0-5.json")
    run.step(5)
    run.exporter.close()
    assert bool(called) == (when == "during")
    error = outcome(tmp_path)["error"]
    assert "no room" in error if when == "before" else error
    assert [entry.name for entry in small_disk.iterdir()] == ["incident-run-0-5.json"]
    records = [line.step for line in lines(tmp_path) if isinstance(line, Step)]
    assert records == list(range(1, run.exporter.global_step + 1))


def test_a_step_waits_for_nothing_while_nobody_asks(tmp_path: Path) -> None:
    with Watch() as watching:
        run = Run(tmp_path)
        run.exporter.forensics(run.save)
        run.step(5)
        watching.caught.clear()
        run.step(15)
        found = list(watching.caught)
    run.exporter.close()
    assert found == []


def test_arguments_of_no_use_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = Run(tmp_path)
    with pytest.raises(TypeError, match="save: 'here' is no function"):
        run.exporter.forensics("here")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="keep: 0 is not positive"):
        run.exporter.forensics(run.save, keep=0)
    with pytest.raises(TypeError, match=r"batches: 1\.5 is not a whole number"):
        run.exporter.forensics(run.save, batches=1.5)  # type: ignore[arg-type]
    run.exporter.close()
    monkeypatch.setenv("TRAINWARDEN_DISABLE", "1")
    off = Exporter(run.model, run.optimizer, run="off", dir=tmp_path)
    off.forensics(run.save)
    off.step(1.0)
    assert not (tmp_path / "off").exists()
