"""The learning rate changed at the onset, or the onset lies at the top of a warm-up.

Sources: cases A03 (failures at the end of the warm-up), A06 (the schedule began anew at a resume).
"""

from __future__ import annotations

import numpy as np

from trainwarden.rules.core.block import Floats
from trainwarden.rules.core.facts import Evidence, Facts, Finding, NotPossible
from trainwarden.rules.core.warmup import at_peak

#: What is said where this line looked and found nothing.
CLEAR = "The learning rate did not rise at the onset."

#: Steps before the onset within which a jump may have caused it.
NEAR = 20
#: Relative change from one record to the next that no usual schedule makes.
JUMP = 1.2


def find(facts: Facts) -> Evidence:
    """Return a finding for a jump, for a warm-up at its top, or against the rate where it was steady."""
    stride = facts.trace.stride()
    rows = facts.trace.rows(facts.onset - NEAR * stride, facts.onset + stride)
    rates = facts.trace.column("lr")[rows]
    steps = facts.trace.steps[rows]
    known = np.isfinite(rates) & (rates > 0)
    rates, steps = rates[known], steps[known]
    if len(rates) < 2:
        return NotPossible("no learning rate is recorded around the onset")
    ratios = rates[1:] / rates[:-1]
    place = int(np.argmax(ratios))
    if ratios[place] > JUMP:
        planned = any(one.step < steps[place + 1] <= one.end for one in facts.changes)
        return [
            Finding(
                kind="learning_rate",
                step=int(steps[place + 1]),
                cause="learning_rate",
                weight=0.7,
                says=f"The learning rate rose {ratios[place]:.3g} times at step {int(steps[place + 1])}{', as planned' if planned else ''}.",
            )
        ]
    whole = facts.before("lr", records=2000)
    if facts.inherited is not None:  # a warm-up goes on behind a resume
        older = facts.inherited.column("lr")
        whole = np.concatenate([older[np.isfinite(older)], whole])
    top = float(np.max(whole)) if len(whole) else 0.0
    if len(whole) >= 100 and rates[-1] >= 0.98 * top and np.median(ratios) > 1 + 1e-9:
        return [
            Finding(
                kind="learning_rate",
                step=facts.onset,
                cause="learning_rate",
                weight=0.45,
                says="The learning rate was still rising and at its highest: the end of a warm-up.",
            )
        ]
    if _moved(facts, rates):
        return []  # another line says what of it: it is no steady rate
    return [
        Finding(
            kind="learning_rate",
            step=facts.onset,
            cause="learning_rate",
            weight=0.0 if at_peak(facts) else -0.3,
            absent=True,
            says="The learning rate did not jump at the onset.",
        )
    ]


def _moved(facts: Facts, rates: Floats) -> bool:
    """Say whether the rate fell at the onset, or is not what it was before the resume."""
    before = facts.at_resume("lr")
    if float(np.min(rates[1:] / rates[:-1])) < 1 / JUMP:
        return True
    return before is not None and before > 0 and not 1 / JUMP < float(rates[0]) / before < JUMP
