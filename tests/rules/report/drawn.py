"""Recordings and reports for tests of pages: made up, small, with whatever a run may hold."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from trainwarden.record import Event, Step, Value
from trainwarden.rules.core.inputs import Start
from trainwarden.rules.report.recorded import Recorded


def lines(
    losses: Sequence[float],
    *,
    first: int = 1,
    attempt: int = 0,
    run: str = "toy",
    more: Mapping[str, Value] | None = None,
) -> Iterator[tuple[Start, int, Step | Event]]:
    """Yield one start's records with these losses, one a step."""
    start = Start("uid", run, attempt, f"s{attempt}")
    for place, loss in enumerate(losses):
        yield (
            start,
            0,
            Step(seq=place + 1, step=first + place, time=float(place), signals={"loss": loss, **(more or {})}),
        )


def recorded(*starts: Iterator[tuple[Start, int, Step | Event]]) -> Recorded:
    """Return what was kept of the given starts."""
    kept = Recorded()
    for start in starts:
        for _ in kept.watch(start):
            pass
    return kept


def falling(n: int) -> list[float]:
    """Return a smooth loss."""
    return [2.0 + 3.0 / math.sqrt(step + 1) for step in range(n)]


def incident(onset: int, **changes: Any) -> dict[str, Any]:
    """Return an incident's row."""
    row: dict[str, Any] = {
        "id": "inc_1",
        "run": "toy",
        "attempt": 0,
        "start_id": "s0",
        "onset_step": onset,
        "onset_uncertainty": 1,
        "opened_step": onset + 1,
        "confirmed_step": onset + 4,
        "closed_step": onset + 40,
        "state": "recovered",
        "severity": "critical",
        "verdict": "level_shift",
        "action": "rollback",
        "held_by": None,
        "done": None,
        "cause": {"name": "data", "confidence": 0.8, "scores": {"data": 0.8, "numeric": 0.1}},
        "alerts": ["TrainingLossSpike"],
        "suspect_samples": [[100, 200]],
        "suspect_epoch": 0,
        "summary": "Level shift from step 60.",
        "cheapest_test": "Replay step 60.",
        "evidence": [{"kind": "batch", "step": onset, "says": "The batch is odd."}],
        "timeline": [{"time": 0.0, "step": onset, "state": "watching", "says": "An alert fires."}],
        "plan": {
            "plan_id": "plan_1",
            "target": {"attempt": 0, "step": 50, "path": "/ckpt/50"},
            "skip_samples": [[100, 200]],
            "skip_mode": "substitute",
            "exclude": [],
            "exclude_hosts": [],
            "reset_optimizer": False,
            "lr_factor": 0.5,
            "rewarmup_steps": 10,
            "reasons": {"target": "It is the newest complete one."},
        },
    }
    return {**row, **changes}


def report(kept: Recorded, incidents: Sequence[dict[str, Any]] = (), **changes: Any) -> dict[str, Any]:
    """Return the result object of a recording."""
    first, last = kept.extent()
    one: dict[str, Any] = {
        "source": "toy.csv",
        "run": "toy",
        "records": last - first + 1,
        "first_step": first,
        "last_step": last,
        "stride": 1,
        "signals": ["loss"],
        "incidents": list(incidents),
        "notices": [],
    }
    return {**one, **changes}
