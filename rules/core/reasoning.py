"""What the report tells of an incident's judgement beside the judgement itself: the sum in words, the order of signals, triage, cost.

All of it follows from the same facts as cause and verdict, and is kept with the incident: it outlives the records.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from msgspec import Struct, field, structs

from trainwarden.record import ShardSpan

from . import cost
from .attribution import Cause
from .cost import Cost
from .facts import Facts
from .order import First, first_signs, in_order
from .prevention import Advice, prevention
from .triage import TRIAL, Checked, triage

#: Shards that are named, and dirty records whose shards are looked up.
MOST_SHARDS, MOST_ROWS = 8, 256


class Reasoned(Struct, frozen=True):
    """The sum of the evidence in words, first signs, all checks, what it cost, and what would have prevented it."""

    explained: str = ""
    order: list[First] = field(default_factory=list)
    triage: list[Checked] = field(default_factory=list)
    prevention: list[Advice] = field(default_factory=list)
    cost: Cost | None = None
    shards: list[ShardSpan] = field(default_factory=list)


def reasoned(before: Reasoned, facts: Facts, cause: Cause, verdict: str) -> Reasoned:
    """Return what is told as of the newest record; what a rollback cost stays what it was."""
    return Reasoned(
        explained=cause.explained,
        order=first_signs(facts),
        triage=triage(facts, verdict, cause.answers),
        prevention=prevention(facts, cause.name),
        shards=_shards(facts),
        cost=before.cost if before.cost is not None and before.cost.thrown else cost.of_loss(facts),
    )


def _shards(facts: Facts) -> list[ShardSpan]:
    """Return the shards from which the batches of the onset and the dirty ones were read."""
    trace = facts.trace
    if not trace.spans or not len(trace):
        return []
    rows = set(range(trace.row(facts.onset - facts.uncertainty), min(trace.row(facts.onset) + 1, len(trace))))
    if facts.dirty.any():
        rows = {facts.rows.start + int(place) for place in np.flatnonzero(facts.dirty)[:MOST_ROWS]}
    found = dict.fromkeys(span for row in sorted(rows) for span in trace.shards(row))
    return list(found)[:MOST_SHARDS]


def answered(before: Reasoned, check: str, outcome: str, says: str, explained: str = "") -> Reasoned:
    """Return it with another answer to one check, which came later than the records of the incident."""
    told = [structs.replace(one, outcome=outcome, says=says) if one.check == check else one for one in before.triage]
    return structs.replace(before, triage=told, explained=explained or before.explained)


def tried(before: Reasoned, factor: float, state: str) -> Reasoned:
    """Return it with what an attempt under ``factor`` times the learning rate showed, once it was verified."""
    if factor == 1.0 or state not in ("recovered", "not_recovered"):
        return before
    if state == "recovered":
        return answered(before, TRIAL, "found", f"With {factor:g} times the learning rate the run went past it.")
    return answered(before, TRIAL, "ruled_out", f"With {factor:g} times the learning rate it did not recover either.")


def as_row(known: Reasoned) -> dict[str, Any]:
    """Return what is told as parts of the incident's row."""
    return {
        "order": {
            "says": in_order(known.order),
            "first": [{"signal": one.signal, "step": one.step, "cadence": one.cadence} for one in known.order],
        },
        "triage": [structs.asdict(one) for one in known.triage],
        "suspect_shards": [{"name": one.name, "first": one.first, "end": one.end} for one in known.shards],
        "cost": None if known.cost is None else structs.asdict(known.cost),
        "prevention": [structs.asdict(one) for one in known.prevention],
    }
