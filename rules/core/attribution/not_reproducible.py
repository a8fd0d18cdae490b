"""Another attempt made the same steps with the same data, and nothing happened: no fault of the data, nor of anything deterministic.

A restart that nobody planned repeats the experiment by itself (case A38). What is left is the machine, or a state that the resume did
not restore. An incident that a *later* attempt passes is judged again by it (docs/causes.md).
"""

from __future__ import annotations

from trainwarden.rules.core.facts import Evidence, Facts, Finding, NotPossible, high_gradient, high_loss
from trainwarden.rules.core.replays import same_batches
from trainwarden.rules.core.resumed import UNPLANNED
from trainwarden.rules.core.trace import Trace

#: What is said where this line looked and found nothing.
CLEAR = "The attempt that made these steps with the same data broke there too."
#: Steps before the onset whose samples are compared, and behind it that the other attempt must have made.
COMPARED, BEHIND = 50, 5
#: What it weighs.
WEIGHTS = (("hardware", 0.4), ("data", -0.8), ("learning_rate", -0.6), ("model", -0.5), ("numeric", -0.4))


def find(facts: Facts) -> Evidence:
    """Return findings where an earlier attempt passed the onset's steps with the same data."""
    if facts.planned != UNPLANNED:
        return NotPossible("this attempt differs on purpose from those before it")
    broke = False
    for attempt in sorted(facts.traces, reverse=True):
        other = facts.traces[attempt]
        if not _made(facts, other):
            continue
        if not same_batches(facts.trace, other, facts.onset - COMPARED, facts.onset):
            continue
        if _abnormal(facts, other):
            broke = True
            continue
        says = (
            f"Attempt {attempt} made step {facts.onset} with the same data and nothing happened: not the data, nor anything "
            "deterministic, but the machine, or a state that was not restored."
        )
        test = "Resume once more from the same checkpoint on other hosts: if it passes there, it was the machine."
        return [
            Finding(kind="not_reproducible", step=facts.onset, cause=cause, weight=weight, says=says, test=test)
            for cause, weight in WEIGHTS
        ]
    return [] if broke else NotPossible("no other attempt made these steps with the same data")


def _made(facts: Facts, other: Trace) -> bool:
    rows = other.rows(facts.onset, facts.onset + (BEHIND + 1) * other.stride())
    made: int = rows.stop - rows.start
    return made > BEHIND


def _abnormal(facts: Facts, other: Trace) -> bool:
    rows = other.rows(facts.onset - facts.uncertainty, facts.onset + (BEHIND + 1) * other.stride())
    _, loss_high, _ = high_loss(other, rows, facts.trend)
    return bool(loss_high.any() or high_gradient(other, rows, facts.usual).any())
