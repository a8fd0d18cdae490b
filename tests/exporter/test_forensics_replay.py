"""The suspect step is made again bit by bit from what a quarantined checkpoint holds; other data is noticed."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader

from tests.exporter.quarantines import Run, ask, copy_of, good, outcome
from tests.exporter.runs import lines
from tests.real import wait_until
from trainwarden.exporter import random_state
from trainwarden.exporter.forensics import ForensicsError, Quarantined, load
from trainwarden.plan import Ledger, LedgerEntry
from trainwarden.record import Step
from trainwarden.runfolder import RunFolder

EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "replay_step.py"


def quarantined(run: Run, **fields: Any) -> Quarantined:
    """Let a run save a checkpoint, train on, and be asked for a copy; it goes on for some steps behind that."""
    last = run.checkpoint()
    step = run.exporter.global_step
    run.step(9)
    ask(run.folder, last_good=good(last, step), suspect_step=step + 6, **fields)
    copy = copy_of(run.folder)
    run.step_until(copy.with_name(f"{copy.name}.json"))
    assert copy.is_dir(), run.exporter.notices
    run.step(5)
    return load(copy)


def made_again(found: Quarantined, run: Run, first: int, last: int, loader: Any = None) -> dict[int, tuple[Any, Any]]:
    """Make steps again under an exporter of their own; return loss and gradient norm of each as recorded."""
    for _, batches in found.batches(loader or run.plain, first, last):
        [batch] = batches
        run.exporter.batch(batch)
        run.update(batch)
    run.exporter.close()
    records = [line for line in lines(run.folder) if isinstance(line, Step)]
    return {record.step: (record.value("loss"), record.value("grad_norm")) for record in records}


def test_from_the_last_good_checkpoint_every_step_is_the_recorded_one_and_the_end_is_the_copy(tmp_path: Path) -> None:
    run = Run(tmp_path / "run")
    run.exporter.forensics(run.save, batches=4)
    run.step(30)
    found = quarantined(run)
    run.exporter.close()
    assert found.last_good is not None
    first = found.last_good.step + 1
    assert [seen.step for seen in found.positions.steps] == list(range(first, found.step + 1))

    again = Run(tmp_path / "again", seed=5)
    again.load(torch.load(found.last_good.path, weights_only=True))
    again.exporter.resumed(found.last_good.step)
    found.restore_random(found.last_good.step)
    made = made_again(found, again, first, found.step)
    assert list(made) == list(range(first, found.step + 1))
    for step, (loss, norm) in made.items():
        seen = found.seen(step)
        assert (seen.number("loss"), seen.number("grad_norm")) == (loss, norm), step
    copy = torch.load(found.checkpoint / "state.pt", weights_only=True)
    for name, value in again.model.state_dict().items():
        assert torch.equal(value, copy["model"][name]), name
    for number, state in again.optimizer.state_dict()["state"].items():
        for name, value in state.items():
            assert torch.equal(value, copy["optimizer"]["state"][number][name]), name


def test_from_the_copy_the_step_that_the_run_made_next_is_made_again(tmp_path: Path) -> None:
    run = Run(tmp_path / "run")
    run.exporter.forensics(run.save)
    run.step(10)
    found = quarantined(run)
    run.exporter.close()
    records = {line.step: line for line in lines(run.folder) if isinstance(line, Step)}
    nexts = records[found.step + 1]

    again = Run(tmp_path / "again", seed=5)
    again.load(torch.load(found.checkpoint / "state.pt", weights_only=True))
    again.exporter.resumed(found.step)
    found.restore_random()
    epoch, position = found.seen(found.step).epoch, found.seen(found.step).position
    again.loader.load_state_dict({**again.loader.state_dict(), "epoch": epoch, "position": position})
    again.step()
    again.exporter.close()
    [made] = [line for line in lines(again.folder) if isinstance(line, Step)]
    assert made.step == nexts.step
    for name in ("loss", "grad_norm", "batch_hash"):
        assert made.value(name) == nexts.value(name) is not None, name


def test_without_the_random_states_a_step_with_dropout_is_another(tmp_path: Path) -> None:
    run = Run(tmp_path / "run")
    run.exporter.forensics(run.save)
    run.step(10)
    found = quarantined(run)
    run.exporter.close()
    assert found.last_good is not None
    again = Run(tmp_path / "again", seed=5)
    again.load(torch.load(found.last_good.path, weights_only=True))
    again.exporter.resumed(found.last_good.step)
    first = found.last_good.step + 1
    made = made_again(found, again, first, first)
    assert made[first][0] != found.seen(first).number("loss")


def test_rows_are_those_that_were_read_stand_ins_and_all(tmp_path: Path) -> None:
    runs = RunFolder("run", tmp_path)
    entry = LedgerEntry(plan_id="p", for_attempt=0, target_step=0, skip_samples=[(20, 60)])
    runs.write_ledger(Ledger(run_uid=runs.open_identity().run_uid, entries=[entry]))
    run = Run(tmp_path)
    read: dict[int, list[int]] = {}
    whole = {tuple(row.tolist()): number for number, row in enumerate(run.rows)}
    run.exporter.forensics(run.save)
    update = run.update

    def noted(batch: torch.Tensor) -> torch.Tensor:
        read[run.exporter.global_step + 1] = [whole[tuple(row.tolist())] for row in batch]
        return update(batch)

    run.update = noted  # type: ignore[method-assign]
    run.step(12)
    ask(tmp_path)
    run.step_until(copy_of(tmp_path).with_name("incident-run-0-5.json"))
    run.exporter.close()
    found = load(copy_of(tmp_path))
    assert any(line.value("substituted_samples") for line in lines(tmp_path) if isinstance(line, Step))
    for seen in found.positions.steps:
        assert found.rows(seen.step) == read[seen.step]


def test_data_that_is_not_the_runs_is_noticed(tmp_path: Path) -> None:
    run = Run(tmp_path)
    run.exporter.forensics(run.save)
    run.step(10)
    found = quarantined(run)
    run.exporter.close()
    assert len(list(found.batches(run.plain))) == 1
    other: Any = DataLoader([row + 1 for row in run.rows], batch_size=4)  # type: ignore[arg-type]
    with pytest.raises(ForensicsError, match=f"the batch of step {found.suspect_step} has hash"):
        list(found.batches(other))
    with pytest.raises(ForensicsError, match="step 999 is not among those told"):
        found.rows(999)
    with pytest.raises(ForensicsError, match="does not collate rows"):
        list(found.batches(iter([])))
    with pytest.raises(ForensicsError, match="no states of a checkpoint of step 3"):
        found.restore_random(3)


def test_what_is_no_whole_copy_is_named(tmp_path: Path) -> None:
    with pytest.raises(ForensicsError, match="is no quarantined checkpoint"):
        load(tmp_path)
    run = Run(tmp_path)
    run.exporter.forensics(run.save)
    run.step(5)
    quarantined(run)
    run.exporter.close()
    copy = copy_of(tmp_path)
    with pytest.raises(ForensicsError, match="had no rank 3"):
        load(copy, rank=3)
    positions = copy / "rank-0" / "positions.json"
    positions.write_bytes(positions.read_bytes()[:-20])
    with pytest.raises(ForensicsError, match=r"positions\.json"):
        load(copy)


def test_an_unwrapped_loader_leaves_a_copy_that_says_what_it_cannot_tell(tmp_path: Path) -> None:
    run = Run(tmp_path)
    run.exporter._loaders.clear()
    run.exporter.forensics(run.save)
    run.step(5)
    ask(tmp_path)
    run.step_until(copy_of(tmp_path).with_name("incident-run-0-5.json"))
    run.exporter.close()
    found = load(copy_of(tmp_path))
    with pytest.raises(ForensicsError, match="the loader was not wrapped"):
        found.rows(found.step)


def test_random_states_come_back_through_a_file_that_holds_no_pickled_objects(tmp_path: Path) -> None:
    def drawn() -> tuple[Any, ...]:
        return (
            torch.rand(3).tolist(),
            np.random.rand(3).tolist(),
            random.random(),
            random.gauss(0, 1),
            np.random.randn(),
        )

    random.gauss(0, 1)  # half of a pair is kept for the next call
    np.random.randn()
    torch.save(random_state.capture([torch.device("cpu")]), tmp_path / "states.pt")
    first = drawn()
    drawn()
    random_state.restore(torch.load(tmp_path / "states.pt", weights_only=True))
    assert drawn() == first


def test_the_example_trains_keeps_its_damaged_state_and_makes_the_suspect_step_again(tmp_path: Path) -> None:
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    environment.pop("TRAINWARDEN_DIR", None)
    training = subprocess.Popen(
        [sys.executable, str(EXAMPLE), "train"], cwd=tmp_path, env=environment, stdout=subprocess.DEVNULL
    )
    folder = tmp_path / ".trainwarden"
    try:

        def poisoned() -> list[int]:
            found = (line for line in lines(folder, "replay-step") if isinstance(line, Step))
            return [line.step for line in found if any(span.name == "calendar" for span in line.shards)]

        wait_until(lambda: (folder / "replay-step" / "run.json").exists(), 60)
        wait_until(lambda: len(poisoned()) > 3, 240, what="the poisoned shard is read", every=1.0)
        onset = poisoned()[0]
        last = (onset - 1) // 25 * 25
        path = tmp_path / ".replay-step" / f"step-{last}"
        ask(folder, run="replay-step", suspect_step=onset, last_good=good(path, last))
        assert outcome(folder, run="replay-step", seconds=60)["saved"] is True
    finally:
        training.send_signal(signal.SIGKILL)
        training.wait()
    copy = copy_of(folder, run="replay-step")
    replayed = subprocess.run(
        [sys.executable, str(EXAMPLE), "replay", str(copy)],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
    )
    assert replayed.returncode == 0, replayed.stdout + replayed.stderr
    said = replayed.stdout.splitlines()
    steps = [line for line in said if line.startswith("step ")]
    assert len(steps) == load(copy).step - last
    assert all(" same " in line for line in steps)
    [suspect] = [line for line in steps if line.endswith("calendar <- suspect")]
    assert suspect.split()[1] == str(onset)
    assert said[-1].endswith("is the copy, bit by bit")
