"""What lowered the learning rate of a run's line for a while, and what the schedule alone would have given there."""

from __future__ import annotations

from collections.abc import Iterable

from msgspec import Struct

from trainwarden.plan import Lowering


class Lowered(Struct, frozen=True):
    """A lowering that the records show, up to step ``last``: the start in which it held may have ended before it."""

    lowering: Lowering
    last: int

    def at(self, step: int) -> float:
        """Return what it multiplied the scheduled rate by at a step."""
        return self.lowering.at(step) if step <= self.last else 1.0


def multiplier(lowered: Iterable[Lowered], step: int) -> float:
    """Return what the scheduled rate was multiplied by at a step of the line."""
    product = 1.0
    for one in lowered:
        product *= one.at(step)
    return product


def inherited(lowered: Iterable[Lowered], resumed_from: int | None) -> list[Lowered]:
    """Return what of a parent's line is that of a start which resumed behind step ``resumed_from``: a lowering ends with its start."""
    if resumed_from is None:
        return []
    return [
        Lowered(one.lowering, min(one.last, resumed_from)) for one in lowered if one.lowering.first_step <= resumed_from
    ]


def cut_off(lowered: Iterable[Lowered], resumed_from: int | None) -> bool:
    """Say whether steps of the parent's line behind the resume, or around it, had another rate than the schedule's."""
    return resumed_from is not None and any(min(one.last, one.lowering.end - 1) >= resumed_from for one in lowered)
