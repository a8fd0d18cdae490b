"""The measurement itself may be at fault: a unit in doubt, a number that repeats, a loss of exactly zero (design §4.9).

What is proved to be the instrument's is said in a notice and closes the incident; here is what speaks for it until then, and which
numbers are none. Sources: cases A05 (a norm repeated over skipped steps), A13 (0.0 after NaN), A30 (another unit).
"""

from __future__ import annotations

import numpy as np

from trainwarden.rules.core.block import Floats
from trainwarden.rules.core.counted import counted
from trainwarden.rules.core.facts import Evidence, Facts, Finding, NotPossible

#: What is said where this line looked and found nothing.
CLEAR = "The signals go on in their unit, and no number repeats or is masked."
#: Equal records in a row that are no measurement, and zeros that are a masked NaN.
REPEATS, ZEROS = 5, 3
#: What a unit in doubt weighs: below what names a cause, for the records that follow decide it.
DOUBT = 0.45


def find(facts: Facts) -> Evidence:
    """Return findings for a unit in doubt, a gradient norm that repeats and a loss of exactly zero."""
    found = []
    if facts.doubted:
        says = "A signal may be logged in another unit since the onset: the records that follow tell."
        found.append(Finding(kind="instrument", step=facts.onset, cause="instrument", weight=DOUBT, says=says))
    loss = facts.loss[np.isfinite(facts.loss)]
    zeros = int(np.count_nonzero(loss == 0.0))
    if zeros >= ZEROS and float(np.min(facts.before("loss"), initial=np.inf)) > 0:
        says = f"The loss is exactly 0 in {counted(zeros, 'record')} since the onset: a number that is not finite, written as 0."
        found.append(Finding(kind="instrument", step=facts.onset, says=says))
    if facts.records < REPEATS and not found:
        return NotPossible(f"fewer than {REPEATS} records since the onset: whether a number repeats is not told yet")
    norms = facts.trace.column("grad_norm")[facts.rows]
    longest, at = _repeats(norms)
    if longest >= REPEATS and len(np.unique(loss)) > 1:
        says = f"The gradient norm is one and the same number in {counted(longest, 'record')} from step {int(facts.steps[at])} on: no measurement."
        found.append(Finding(kind="instrument", step=int(facts.steps[at]), says=says))
    return found


def _repeats(values: Floats) -> tuple[int, int]:
    """Return the length of the longest run of one finite number other than zero, and where it begins."""
    longest = best = 0
    first = 0
    for place in range(1, len(values) + 1):
        if place == len(values) or values[place] != values[first]:
            if place - first > longest and np.isfinite(values[first]) and values[first] != 0:
                longest, best = place - first, first
            first = place
    return longest, best
