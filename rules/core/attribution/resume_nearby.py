"""The run was resumed shortly before the onset.

What a resume restores badly (moments, step counter, data order) shows within a few steps (cases A05, A06, A07).
"""

from __future__ import annotations

from trainwarden.rules.core.counted import counted
from trainwarden.rules.core.facts import Evidence, Facts, Finding, NotPossible

#: What is said where this line looked and found nothing.
CLEAR = "The last resume is more than twenty steps before the onset."

#: Steps after a resume within which it is suspect.
NEAR = 20


def find(facts: Facts) -> Evidence:
    """Return a finding where this start resumed from a checkpoint at most 20 steps before the onset."""
    if facts.resumed_from is None or facts.first_step is None:
        return NotPossible("this start did not resume from a checkpoint")
    after = facts.onset - facts.first_step
    if not 0 <= after <= NEAR:
        return []
    return [
        Finding(
            kind="resume_nearby",
            step=facts.first_step,
            cause="optimizer_state",
            weight=0.55,
            says=f"The run was resumed from step {facts.resumed_from}, {counted(after, 'step')} before the onset.",
        )
    ]
