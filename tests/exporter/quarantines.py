"""Runs that can be asked for a quarantined checkpoint, and requests for one as the receiver writes them."""

from __future__ import annotations

import json
import time
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader

from tests.exporter.gpt import GPT
from tests.exporter.runs import watch
from tests.real import wait_until
from trainwarden.exporter import Exporter
from trainwarden.plan import Plan, Quarantine, Target
from trainwarden.runfolder import RunFolder

VOCABULARY, LENGTH, ROWS = 64, 16, 96
#: Rows of the data set by shard.
SHARDS = [("a", 0, 32), ("b", 32, 64), ("c", 64, 96)]


def ask(folder: Path, incident: str = "run-0-5", run: str = "run", attempt: int = 0, **fields: Any) -> Path:
    """Write a request as the receiver does; ``fields`` replace those of the plan's quarantine, ``plan_id`` and ``run_uid`` its own."""
    runs = RunFolder(run, folder)
    identity = runs.identity()
    assert identity is not None
    asked: dict[str, Any] = {
        "incident": incident,
        "expires_at": (datetime.now(UTC) + timedelta(seconds=fields.pop("seconds", 600))).isoformat(),
        "suspect_step": 1,
    }
    plan_id, run_uid = fields.pop("plan_id", f"q-{incident}"), fields.pop("run_uid", identity.run_uid)
    return runs.write_plan(
        Plan(
            plan_id=plan_id,
            run_uid=run_uid,
            for_attempt=attempt,
            action="quarantine",
            quarantine=Quarantine(**{**asked, **fields}),
        )
    )


def outcome(folder: Path, incident: str = "run-0-5", run: str = "run", seconds: float = 30.0) -> dict[str, Any]:
    """Wait until it is known how a request ended."""
    path = RunFolder(run, folder).quarantine_folder / f"incident-{incident}.json"
    wait_until(path.exists, seconds, what=f"{path.name} is there")
    found: dict[str, Any] = json.loads(path.read_bytes())
    return found


def copy_of(folder: Path, incident: str = "run-0-5", run: str = "run") -> Path:
    """Return where a whole copy lies."""
    return RunFolder(run, folder).quarantine_folder / f"incident-{incident}"


def good(path: Path, step: int) -> Target:
    """Return a checkpoint as a request names the last good one."""
    return Target(attempt=0, step=step, path=str(path))


class Run:
    """A small GPT with dropout that trains under an exporter; its data is a function of the loader's order."""

    def __init__(self, folder: Path, seed: int = 0, dirty: range = range(0), **settings: Any) -> None:
        torch.manual_seed(seed)
        self.folder = folder
        self.model = nn.Sequential(GPT(vocabulary=VOCABULARY, length=LENGTH), nn.Dropout(0.1))
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-2)
        generator = torch.Generator().manual_seed(7)
        rows = torch.randint(0, VOCABULARY, (ROWS, LENGTH), generator=generator)
        rows[dirty.start : dirty.stop] = 3
        self.rows = list(rows)
        self.exporter: Exporter = watch(self.model, self.optimizer, folder, **settings)
        self.plain: Any = DataLoader(self.rows, batch_size=4, shuffle=True)  # type: ignore[arg-type]
        self.loader = self.exporter.wrap(self.plain, seed=1, shards=SHARDS, dataset="toy", order="blocks")
        self.losses: dict[int, float] = {}
        self._passing: Any = iter(())

    def state(self) -> dict[str, Any]:
        return {
            "model": self.model.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "step": self.exporter.global_step,
        }

    def load(self, state: dict[str, Any]) -> None:
        self.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])

    def save(self, path: Path) -> None:
        """Save as a trainer does that wants to be asked for its state."""
        torch.save(self.state(), path / "state.pt")

    def checkpoint(self) -> Path:
        """Save a checkpoint of the last step and report it."""
        path = self.folder / f"step-{self.exporter.global_step}.pt"
        torch.save(self.state(), path)
        self.exporter.checkpoint(self.exporter.global_step, path)
        return path

    def update(self, batch: torch.Tensor) -> torch.Tensor:
        loss = nn.functional.cross_entropy(self.model(batch[:, :-1]).flatten(0, 1), batch[:, 1:].flatten())
        self.optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        self.exporter.step(loss)
        return loss.detach()

    def step(self, count: int = 1) -> None:
        """Train on, over as many epochs as that takes."""
        for _ in range(count):
            batch = next(self._passing, None)
            if batch is None:
                self._passing = iter(self.loader)
                batch = next(self._passing)
            loss = self.update(batch)
            self.losses[self.exporter.global_step] = float(loss)

    def step_until(self, path: Path, most: int = 4000) -> None:
        """Train until a file is there."""

        def stepped() -> bool:
            self.step()
            return path.exists()

        wait_until(stepped, 30, what=f"{path} is there", every=0.002)


def kept(run: Run, incident: str = "run-0-5", **fields: Any) -> Path:
    """Ask a run for a copy, train until there is one, and return it."""
    ask(run.folder, incident, **fields)
    copy = copy_of(run.folder, incident)
    run.step_until(copy.with_name(f"{copy.name}.json"))
    assert copy.is_dir(), run.exporter.notices
    return copy


def trained_for(run: Run, seconds: float) -> None:
    """Train for long enough that a request would have been seen."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        run.step()
