"""The onset lies shortly behind the top of a warm-up: the rate reached what the model does not bear.

The source is case A03: three of three failures came where the warm-up ended. Weak alone, for much else begins early in a run.
"""

from __future__ import annotations

from trainwarden.rules.core.counted import counted
from trainwarden.rules.core.facts import Evidence, Facts, Finding, NotPossible
from trainwarden.rules.core.warmup import at_peak

#: What is said where this line looked and found nothing.
CLEAR = "The onset does not lie shortly behind the top of a warm-up."
#: What it weighs.
WEIGHT = 0.4


def find(facts: Facts) -> Evidence:
    """Return a finding where the rate had reached its peak at most half a warm-up's length before the onset."""
    if not facts.trace.measured("lr").any():
        return NotPossible("no learning rate is recorded")
    found = at_peak(facts)
    if found is None:
        return []
    says = (
        f"The learning rate reached its peak of {found.high:.3g} at step {found.top}, {counted(facts.onset - found.top, 'step')} before "
        f"the onset, after a warm-up over {counted(found.steps, 'step')}."
    )
    return [Finding(kind="lr_peak", step=found.top, cause="learning_rate", weight=WEIGHT, says=says)]
