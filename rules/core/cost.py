"""What an incident cost, in steps and in time, from the records: steps that were thrown away, or steps at a loss above its trend."""

from __future__ import annotations

import math

import numpy as np
from msgspec import Struct

from .facts import Facts
from .trace import Trace
from .verdict import lasting


class Cost(Struct, frozen=True):
    """``steps`` thrown away by a rollback (``thrown``), or else trained at an abnormal loss; ``seconds`` they took, None where unknown.

    ``idle``: seconds from the last record of the broken attempt to the start of the next one.
    """

    steps: int
    seconds: float | None = None
    thrown: bool = False
    idle: float | None = None


def of_loss(facts: Facts) -> Cost:
    """Return what an incident cost that threw nothing away: the steps from the first to the last record with an abnormal loss."""
    steps = lasting(facts)
    places = np.flatnonzero(facts.loss_high)
    if not len(places):
        return Cost(0, 0.0)
    times = facts.trace.times()[facts.rows]
    took = float(times[places[-1]] - times[places[0]]) + (facts.trace.interval() or 0.0)
    return Cost(steps, took if math.isfinite(took) and took >= 0 else None)


def of_rollback(broken: Trace | None, target: int | None, began: float) -> Cost | None:
    """Return what going back to step ``target`` threw away of the broken attempt, whose next start began at ``began`` (Unix seconds)."""
    if broken is None or not len(broken):
        return None
    last, times = int(broken.steps[-1]), broken.times()
    back = target if target is not None else 0
    idle = began - float(times[-1])
    row = min(broken.row(back + 1), len(broken) - 1)
    took = float(times[-1] - times[row]) + (broken.interval() or 0.0)
    if broken.row(back + 1) == 0 and int(broken.steps[0]) > back + 1:
        took = math.nan  # the first of those steps have left the memory
    return Cost(
        max(0, last - back),
        took if math.isfinite(took) and took >= 0 else None,
        thrown=True,
        idle=idle if math.isfinite(idle) and idle >= 0 else None,
    )
