"""Which signals became abnormal first: an order between two is told only where it exceeds the cadence of both (design §4.2).

Gradient norm, update ratio and loss scale lead the loss by 1 to 30 steps (cases A01, A04, A10); a signal that is measured every tenth step
may have been abnormal for nine before it was seen to be.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
from msgspec import Struct

from .baseline import above, below
from .block import Bools
from .facts import GRAD_FACTOR, GRAD_SDS, Facts, dirty_rows, high_loss
from .onset import LEAD_STEPS
from .trace import FINGERPRINT

#: Signals that are abnormal where they lie above their usual value, with the baselines of :mod:`.facts`.
RISING = ("grad_norm", "update_ratio", "exp_avg", "exp_avg_sq")
#: Part of its usual value below which the loss scale has fallen: a back-off halves it.
FELL = 0.6
#: What the batch's fingerprint is called.
BATCH = "batch"


class First(Struct, frozen=True):
    """The first step at which a signal was abnormal, and the steps between two of its measurements."""

    signal: str
    step: int
    cadence: int


def first_signs(facts: Facts) -> list[First]:
    """Return the signals that became abnormal around the onset, the first one first."""
    trace = facts.trace
    rows = trace.rows(facts.onset - LEAD_STEPS * trace.stride(), facts.now + 1)
    steps = trace.steps[rows]
    found = []
    for name, odd in _odd(facts, rows):
        at_all = np.flatnonzero(odd & (steps >= facts.onset))
        if not len(at_all):
            continue
        place = int(at_all[0])
        while place > 0 and odd[place - 1]:  # the stretch that reaches over the onset began before it
            place -= 1
        found.append(First(name, int(steps[place]), max(trace.cadence(_measured(name)), trace.stride())))
    return sorted(found, key=lambda one: (one.step, one.signal))


def _measured(name: str) -> str:
    return FINGERPRINT[0] if name == BATCH else name


def _odd(facts: Facts, rows: slice) -> Iterator[tuple[str, Bools]]:
    trace, usual = facts.trace, facts.usual
    yield "loss", high_loss(trace, rows, facts.trend)[1]
    yield BATCH, dirty_rows(trace, rows, usual)
    for name in RISING:
        if name in usual:
            yield name, trace.measured(name)[rows] & above(trace.column(name)[rows], usual[name], GRAD_SDS, GRAD_FACTOR)
    if "loss_scale" in usual:
        yield (
            "loss_scale",
            trace.measured("loss_scale")[rows]
            & below(trace.column("loss_scale")[rows], usual["loss_scale"], 0.0, FELL),
        )


def in_order(found: Sequence[First]) -> str:
    """Return the order in words: what the cadences do not part is told together; an empty text for fewer than two signals."""
    if len(found) < 2:
        return ""
    parts: list[list[First]] = [[found[0]]]
    for one in found[1:]:
        if all(one.step - before.step > max(one.cadence, before.cadence) for before in parts[-1]):
            parts.append([one])
        else:
            parts[-1].append(one)
    told = [_together(part) for part in parts]
    if len(told) == 1:
        return f"At about the same time: {told[0]}."
    return f"First {', then '.join(told)}."


def _together(part: Sequence[First]) -> str:
    names = [f"{one.signal} at step {one.step}" for one in part]
    return names[0] if len(names) == 1 else f"{', '.join(names[:-1])} and {names[-1]}"
