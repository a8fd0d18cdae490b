"""A script does the same whether it is watched or not: switched off, or where the exporter could not be put together."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.exporter.runs import make, watch
from trainwarden.exporter import Exporter
from trainwarden.exporter.loader import WatchedLoader
from trainwarden.plan import Plan, Target
from trainwarden.runfolder import RunFolder

EXAMPLES = Path(__file__).parents[2] / "examples"


@pytest.fixture(params=["switched off", "not put together"])
def turn_off(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    """Return what makes every later exporter of this test an unwatched one, until ``monkeypatch.undo()``."""

    def broken(*_: Any, **__: Any) -> None:
        raise OSError(errno.EIO, "planted")

    if request.param == "switched off":
        return lambda: monkeypatch.setenv("TRAINWARDEN_DISABLE", "1")
    return lambda: monkeypatch.setattr("trainwarden.exporter.exporter.assemble", broken)


def attach(folder: Path) -> Exporter:
    model = make()
    return watch(model, torch.optim.SGD(model.parameters(), lr=0.1), folder / "runs")


def rows(count: int = 64) -> Any:
    return torch.utils.data.DataLoader(torch.arange(count), batch_size=4, shuffle=True)  # type: ignore[arg-type]


def contents(folder: Path) -> dict[str, bytes]:
    """Return all files below a folder, and its folders as empty ones."""
    return {str(path): path.read_bytes() if path.is_file() else b"" for path in folder.rglob("*")}


def train(folder: Path, save_at: int | None = None) -> tuple[list[list[int]], Exporter]:
    """Do what the page on data and resuming shows, over one epoch; return the batches and the closed exporter."""
    exporter = attach(folder)
    loader = exporter.wrap(rows(), seed=3)
    target = exporter.resume()
    step = 0
    if target is not None:
        state = torch.load(target.path, weights_only=True)
        loader.load_state_dict(state["loader"])
        step = state["step"]
    exporter.resumed(step)
    batches = []
    for batch in loader:
        batches.append(batch.tolist())
        step += 1
        exporter.step(1.0)
        assert exporter.global_step == step
        if step == save_at:
            path = folder / f"step-{step}.pt"
            torch.save({"loader": loader.state_dict(), "step": step}, path)
            exporter.checkpoint(step, path)
    exporter.close()
    return batches, exporter


def roll_back(folder: Path) -> None:
    """Write a plan for attempt 1: back to step 5 of attempt 0, without positions 24 to 32, at half the rate."""
    runs = RunFolder("run", folder / "runs")
    identity = runs.identity()
    assert identity is not None
    runs.write_plan(
        Plan(
            plan_id="p1",
            run_uid=identity.run_uid,
            for_attempt=1,
            target=Target(attempt=0, step=5, path=str(folder / "step-5.pt")),
            skip_samples=[(24, 32)],
            lr_factor=0.5,
        )
    )


def test_the_data_and_the_steps_are_those_of_a_watched_run(
    tmp_path: Path, turn_off: Callable[[], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    turn_off()
    unseen, _ = train(tmp_path / "a")
    monkeypatch.undo()
    (tmp_path / "b").mkdir()
    assert train(tmp_path / "b")[0] == unseen
    assert not (tmp_path / "a").exists()


def test_it_resumes_from_what_the_plan_says_without_the_skipped_data_and_writes_nothing(
    tmp_path: Path, turn_off: Callable[[], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    whole, _ = train(tmp_path, save_at=5)
    roll_back(tmp_path)
    before = contents(tmp_path / "runs")
    turn_off()
    unseen, exporter = train(tmp_path)
    assert contents(tmp_path / "runs") == before
    assert (exporter.attempt, exporter.port, exporter.start_id) == (1, None, None)
    assert exporter.global_step == len(whole) == 5 + len(unseen)
    (said,) = [sentence for sentence in exporter.notices if "plan p1" in sentence]
    assert "not applied" in said
    monkeypatch.undo()
    seen, exporter = train(tmp_path)
    assert exporter.attempt == 1
    assert seen == unseen
    assert [mine == theirs for mine, theirs in zip(seen, whole[5:], strict=True)] == [True, False, False] + [True] * 7


def test_the_plans_rate_and_reset_are_left_out(tmp_path: Path, turn_off: Callable[[], None]) -> None:
    train(tmp_path, save_at=5)
    roll_back(tmp_path)
    turn_off()
    model = make()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    exporter = watch(model, optimizer, tmp_path / "runs")
    exporter.resumed(5)
    assert not optimizer._optimizer_step_pre_hooks
    assert not optimizer._optimizer_step_post_hooks


def test_no_batch_is_kept_that_a_step_was_closed_for(tmp_path: Path, turn_off: Callable[[], None]) -> None:
    turn_off()
    exporter = attach(tmp_path)
    loader = exporter.wrap(rows())
    assert isinstance(loader, WatchedLoader)
    for _ in loader:
        exporter.step(1.0)
    assert loader.consumed() is None


def test_steps_count_on_after_close(tmp_path: Path) -> None:
    exporter = attach(tmp_path)
    exporter.step(1.0)
    exporter.close()
    exporter.step(1.0)
    assert exporter.global_step == 2


def test_a_start_that_fails_inside_costs_no_step_number(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: Any, **__: Any) -> None:
        raise OSError(errno.EIO, "planted")

    monkeypatch.setattr("trainwarden.exporter.reports.Reports.begin", broken)
    exporter = attach(tmp_path)
    for _ in range(3):
        exporter.step(1.0)
    assert exporter.global_step == 3
    exporter.close()


def test_what_cannot_be_read_costs_the_skips_and_not_the_state_of_the_loader(
    tmp_path: Path, turn_off: Callable[[], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: Any, **__: Any) -> None:
        raise OSError(errno.EIO, "planted")

    monkeypatch.setattr("trainwarden.exporter.exporter.Resume.read", broken)
    turn_off()
    exporter = attach(tmp_path)
    assert exporter.wrap(rows()).state_dict()["position"] == 0
    assert exporter.resume() is None
    assert any("what to skip" in sentence and "planted" in sentence for sentence in exporter.notices)


def test_what_watch_refuses_comes_back_as_it_was_and_the_notices_say_why(
    tmp_path: Path, turn_off: Callable[[], None]
) -> None:
    turn_off()
    exporter = attach(tmp_path)
    loader = rows()
    assert exporter.wrap(loader, order="backwards") is loader
    assert "backwards" in exporter.notices[-1]


def test_the_minimal_script_ends_when_it_is_switched_off_and_leaves_nothing(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, str(EXAMPLES / "minimal.py"), "5"],
        env={**os.environ, "TRAINWARDEN_DISABLE": "1", "OMP_NUM_THREADS": "1"},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    )
    assert "None" not in done.stdout
    assert "5 steps, last loss" in done.stdout
    assert list(tmp_path.iterdir()) == []
