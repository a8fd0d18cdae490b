"""The onset coincides with the first position of a shard.

Weak alone (in block order every step is near some boundary when shards are small), telling together with a fingerprint.
"""

from __future__ import annotations

from trainwarden.rules.core.counted import counted
from trainwarden.rules.core.facts import Evidence, Facts, Finding, NotPossible

#: What is said where this line looked and found nothing.
CLEAR = "No shard begins at the onset or right before it."

#: Steps between the shard's first batch and the onset.
NEAR = 2


def find(facts: Facts) -> Evidence:
    """Return a finding where a shard's first position was consumed at the onset or up to two steps before it."""
    if not facts.trace.spans:
        return NotPossible("the records name no shards")
    stride = facts.trace.stride()
    rows = facts.trace.rows(facts.onset - NEAR * stride, facts.onset + stride + 1)
    for row in range(rows.start, rows.stop):
        samples = facts.trace.samples(row)
        for span in facts.trace.shards(row):
            read_per_step = sum(end - first for first, end in samples)
            if not read_per_step or span.end - span.first <= 4 * read_per_step:
                continue  # no extent of a whole shard, or so small that a boundary is always near
            if any(first <= span.first < end for first, end in samples):
                step = int(facts.trace.steps[row])
                return [
                    Finding(
                        kind="shard_boundary",
                        step=step,
                        cause="data",
                        weight=0.3,
                        says=f"Shard {span.name} begins at step {step}, {counted(facts.onset - step, 'step')} before the onset.",
                    )
                ]
    return []
