"""The loss scale had been falling long before the onset: gradients grew all that time, and it was not the batch of the onset.

The source is case A03: reviewers saw the fall from step 4700 on, 2300 steps before the loss broke.
"""

from __future__ import annotations

from trainwarden.rules.core.drift import first_sign
from trainwarden.rules.core.facts import Evidence, Facts, Finding, NotPossible

#: What is said where this line looked and found nothing.
CLEAR = "The loss scale did not fall for long before the onset."
#: What it weighs for numerics, and against the batch of the onset.
WEIGHT, AGAINST = 0.2, -0.3


def find(facts: Facts) -> Evidence:
    """Return findings where the scale fell by two halvings or more and never came back until the onset."""
    if not facts.trace.measured("loss_scale").any():
        return NotPossible("no loss scale is recorded")
    step = first_sign(facts.trace, facts.inherited, facts.onset)
    if step is None:
        return []
    says = f"The loss scale fell from step {step} on and never came back before the onset: gradients had been growing all that time."
    return [
        Finding(kind="scale_trend", step=step, cause="numeric", weight=WEIGHT, says=says),
        Finding(kind="scale_trend", step=step, cause="data", weight=AGAINST, says=says),
    ]
