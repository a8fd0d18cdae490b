"""Spikes that come again and again: how many, for what part of the time, and how many surges of the update the loss followed.

Dozens of spikes on as many batches are no batch's doing: in one run of 32 billion parameters the update grew twofold a few steps
before each, and leaving out steps shortened nothing (case A10).
"""

from __future__ import annotations

import numpy as np

from trainwarden.rules.core.block import Ints
from trainwarden.rules.core.counted import counted
from trainwarden.rules.core.facts import Evidence, Facts, Finding

#: What is said where this line looked and found nothing.
CLEAR = "No rule saw spikes come again and again, or there are too few to count."

#: Records without anything abnormal that part two spikes, and those behind a surge within which the loss follows it.
APART, FOLLOWS = 10, 5
#: Spikes from which batches are cleared.
MANY = 4


def find(facts: Facts) -> Evidence:
    """Return a finding where a rule says that spikes recur and there are several."""
    if "recurring_spikes" not in facts.offered:
        return []
    begins = _begins(np.flatnonzero(facts.loss_high | facts.grad_high))
    if len(begins) < MANY:
        return []
    share = float(np.mean(facts.loss_high | facts.grad_high))
    led = [begin for begin in begins if facts.grad_high[begin]]
    followed = sum(bool(facts.loss_high[begin : begin + FOLLOWS + 1].any()) for begin in led)
    span = int(facts.steps[-1] - facts.steps[0]) + facts.trace.stride()
    says = f"{len(begins)} separate spikes in {counted(span, 'step')}, {100 * share:.0f} % of the time"
    if led:
        says += f"; the loss followed {followed} of {len(led)} that the gradient or the update began"
    says += ". So many batches cannot all be bad: the recipe is for a person to look at."
    return [Finding(kind="recurring", step=facts.onset, cause="data", weight=-0.6, says=says)]


def _begins(places: Ints) -> list[int]:
    """Return the first row of each spike."""
    if not len(places):
        return []
    apart = np.flatnonzero(np.diff(places) > APART) + 1
    return [int(places[0]), *places[apart].tolist()]
