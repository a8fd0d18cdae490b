"""The optimizer's own state: its step counter and its moments.

A counter that went back means that the bias correction begins anew (case A05); a first moment that doubles before the loss rises, while
the second does not, is the optimizer's doing, not the data's (case A10). Behind a jump of the loss, whatever made it, the first moment
doubles as well: all gradients then point the same way.
"""

from __future__ import annotations

import numpy as np

from trainwarden.rules.core.block import Floats
from trainwarden.rules.core.facts import Evidence, Facts, Finding, NotPossible

#: What is said where this line looked and found nothing.
CLEAR = "The optimizer's own counter went on, and the first moment did not grow without the second."

#: Steps before the onset that still count.
NEAR = 20


def find(facts: Facts) -> Evidence:
    """Return findings about the counter and the moments, where they were measured."""
    found: list[Finding] = []
    stride = facts.trace.stride()
    rows = facts.trace.rows(facts.onset - NEAR * stride, facts.now + 1)
    steps = facts.trace.steps[rows]
    counter = facts.trace.column("optimizer_step")[rows]
    known = np.isfinite(counter)
    if known.sum() >= 2:
        drops = np.flatnonzero(np.diff(counter[known]) < 0)
        if len(drops):
            step = int(steps[known][drops[0] + 1])
            found.append(
                Finding(
                    kind="moments",
                    step=step,
                    cause="optimizer_state",
                    weight=0.8,
                    says=f"The optimizer's own step counter went back at step {step}: its bias correction began anew.",
                )
            )
    if not known.any() and not facts.usual.get("exp_avg"):
        return NotPossible("neither the optimizer's step counter nor its moments are recorded")
    first, second = facts.usual.get("exp_avg"), facts.usual.get("exp_avg_sq")
    near = facts.trace.rows(facts.onset - NEAR * stride, min(facts.onset + NEAR * stride, _high(facts)))
    if first and second and first.median > 0 and second.median > 0:
        top = _top(facts.trace.column("exp_avg")[near]) / first.median
        other = _top(facts.trace.column("exp_avg_sq")[near]) / second.median
        if top > 1.8 and other < 1.2:
            found.append(
                Finding(
                    kind="moments",
                    step=facts.onset,
                    cause="optimizer_state",
                    weight=0.4,
                    says=f"The first moment grew {top:.2g} times before the loss rose, the second hardly ({other:.2g}).",
                )
            )
    return found


def _high(facts: Facts) -> int:
    """Return the step of the first abnormal loss, one behind the last record where there is none."""
    return int(facts.steps[int(np.argmax(facts.loss_high))]) if facts.loss_high.any() else facts.now + 1


def _top(values: Floats) -> float:
    finite = values[np.isfinite(values)]
    return float(np.max(finite)) if len(finite) else 0.0
