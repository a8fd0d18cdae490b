"""What happened beside the steps of a run, and behind what its incidents began: remembered by step, within bounds.

Evaluations and checkpoints come at intervals, and so do the ends of epochs: only what is remembered of many of them tells whether
a spike that follows one follows it by chance.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right

import numpy as np
from msgspec import Struct, field

from trainwarden.record import Event

#: Kinds that are remembered at most, steps of each, and beginnings of incidents.
KINDS, STEPS, BEGINNINGS = 16, 256, 64
#: What is a start's own and no occasion within it.
APART = ("start", "exit", "resume", "preflight", "lower_lr")
#: Fields of an event that adds to an earlier one, or tells of what was done because an incident is open.
LATER = (("state", "end"), ("deleted", True), ("pinned", True), ("abandoned", True), ("quarantined", True))
#: What a phase must be to count as an occasion.
PHASES = ("evaluation", "checkpoint")
#: Steps behind an occasion within which something began right behind it (case A39: 1 to 3); see :func:`reach`.
BEHIND = 3
#: Characters of a kind that is remembered: what is longer is no word, and would be stored again and again.
LONGEST = 40
#: A step is one below this.
LARGEST = 2**53


class Beginning(Struct, frozen=True):
    """Where an incident began, and the occasions right behind which that was, each with its step."""

    incident: str
    onset: int
    behind: dict[str, int]


class Events(Struct):
    """``steps``: at which steps each kind of event happened, ascending. ``beginnings``: of incidents above information."""

    steps: dict[str, list[int]] = field(default_factory=dict)
    beginnings: list[Beginning] = field(default_factory=list)

    def interval(self, kind: str) -> float | None:
        """Return the usual steps between two events of a kind, None where there are fewer than two."""
        known = self.steps.get(kind, ())
        return float(np.median(np.diff(known))) if len(known) > 1 else None


def remember(events: Events, event: Event) -> None:
    """Take an event: by its kind, or by the phase that begins with it. What only adds to an earlier one is no occasion."""
    fields = event.fields
    kind = event.kind
    if kind == "phase":
        kind = str(fields.get("phase"))
        if kind not in PHASES:
            return
    elif len(kind) > LONGEST or kind in APART or any(fields.get(name) == value for name, value in LATER):
        return
    step = fields.get("step", event.step)
    if isinstance(step, bool) or not isinstance(step, int) or not 0 <= step < LARGEST:
        return
    known = events.steps.get(kind)
    if known is None:
        if len(events.steps) >= KINDS:
            return
        known = events.steps[kind] = []
    place = bisect_left(known, step)
    if place == len(known) or known[place] != step:
        known.insert(place, step)
        del known[:-STEPS]


def reach(stride: int) -> int:
    """Return within how many steps something is right behind an occasion: a few, or the first record where each covers many."""
    return max(BEHIND, stride)


def behind(events: Events, onset: int, stride: int) -> dict[str, int]:
    """Return the occasions right behind which ``onset`` is: the kind and the step of the newest of each."""
    found = {}
    for kind in PHASES:
        known = events.steps.get(kind, [])
        place = bisect_right(known, onset)
        if place and onset - known[place - 1] <= reach(stride):
            found[kind] = known[place - 1]
    return found


def begun(events: Events, incident: str, onset: int, stride: int) -> None:
    """Note where an incident began; its onset may have moved since it was noted."""
    beginning = Beginning(incident, onset, behind(events, onset, stride))
    for place, known in enumerate(events.beginnings):
        if known.incident == incident:
            events.beginnings[place] = beginning
            return
    events.beginnings.append(beginning)
    del events.beginnings[:-BEGINNINGS]
