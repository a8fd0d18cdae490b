"""The loss left its trend in one record alone: a batch is as wide as that, and what broke the state would last longer.

Source: public runs of modded-nanogpt, whose rank-0 loss has such points every few hundred steps, the same ones in every run of one data
order.
"""

from __future__ import annotations

import numpy as np

from trainwarden.rules.core.facts import Evidence, Facts, Finding, NotPossible

#: What is said where this line looked and found nothing.
CLEAR = "The loss did not leave its trend, or in more than one record."
#: Records that must follow, and what it weighs.
FOLLOW, WEIGHT = 3, 0.2


def find(facts: Facts) -> Evidence:
    """Return a finding where one record alone is high and those behind it are back."""
    if facts.trend is None:
        return NotPossible("there is no trend of the loss before the onset")
    if facts.trace.stride() > 1:
        return NotPossible(f"a record covers {facts.trace.stride()} steps: one step cannot be told")
    places = np.flatnonzero(facts.loss_high)
    if len(places) != 1 or facts.nonfinite.any():
        return []
    place = int(places[0])
    behind = facts.excess[place + 1 :]
    if np.count_nonzero(np.isfinite(behind)) < FOLLOW:
        return NotPossible(f"fewer than {FOLLOW} records follow the one that is high")
    step = int(facts.steps[place])
    says = f"The loss left its trend at step {step} alone and was back in the next record: as wide as one batch."
    return [Finding(kind="one_step", step=step, cause="data", weight=WEIGHT, says=says)]
