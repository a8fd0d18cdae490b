"""The onset coincides with the first position of a shard, or the incident with the whole of it.

Weak alone where shards are small, since in block order every step is near some boundary then; the longer the shard, the less it is a
coincidence. What is abnormal within a shard and nowhere behind it is the shard's doing.
"""

from __future__ import annotations

from trainwarden.rules.core.counted import counted
from trainwarden.rules.core.facts import Evidence, Facts, Finding, NotPossible
from trainwarden.rules.core.shards import begun

#: What is said where this line looked and found nothing.
CLEAR = "No shard begins at the onset or right before it."

#: The chance from which a boundary near the onset is a coincidence like any other, what it weighs then and below, and a whole shard.
LIKELY, WEAK, TELLING, WHOLE = 0.03, 0.3, 0.5, 0.8


def find(facts: Facts) -> Evidence:
    """Return a finding where a shard's first position was consumed at the onset or up to two steps before it."""
    if not facts.trace.spans:
        return NotPossible("the records name no shards")
    shard = begun(facts)
    if shard is None:
        return []
    weight = WEAK if shard.chance > LIKELY else TELLING
    says = (
        f"Shard {shard.name} begins at step {shard.step}, {counted(facts.onset - shard.step, 'step')} before the onset."
    )
    if shard.step > facts.onset:
        says = f"Shard {shard.name} begins at step {shard.step}, right behind the onset."
    if shard.bounded:
        weight = WHOLE
        says = f"Shard {shard.name} begins at step {shard.step}; most of its steps are abnormal, and those behind its end are not."
    return [Finding(kind="shard_boundary", step=shard.step, cause="data", weight=weight, says=says)]
