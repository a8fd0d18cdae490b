"""The loss scale fell, or steps were skipped, around the onset. What a guard left out says nothing of the loss scale.

Sources: cases A01 to A05 and C01 (halvings before and during the failure). One back-off in a few hundred steps is by design
(case B06) and says nothing.
"""

from __future__ import annotations

import numpy as np

from trainwarden.rules.core.counted import counted
from trainwarden.rules.core.facts import Evidence, Facts, Finding, NotPossible

#: What is said where this line looked and found nothing.
CLEAR = "The loss scale did not fall by three halvings around the onset, and no three steps were skipped."

#: Steps before the onset that still count.
NEAR = 10
#: Halvings from which the fall is no usual back-off.
HALVINGS = 3
#: Halvings from which it is a collapse (case C01), and what that weighs: the run ends at the scale's floor, whatever the loss was.
COLLAPSE, COLLAPSED = 5, 0.6
#: Skipped steps, and their part of those since the onset, from which the scaler does not work, and what that weighs: no back-off helped.
STUCK, PART, USELESS = 20, 0.5, 0.7


def find(facts: Facts) -> Evidence:
    """Return a finding for a fall of at least three halvings or as many skipped steps."""
    stride = facts.trace.stride()
    rows = facts.trace.rows(facts.onset - NEAR * stride, facts.now + 1)
    scale = facts.trace.column("loss_scale")[rows]
    steps = facts.trace.steps[rows]
    scale_known = np.isfinite(scale)
    if not scale_known.any() and not facts.trace.measured("skipped")[rows].any():
        return NotPossible("no loss scale and no skipped step is recorded")
    skipped = float(np.nansum(np.maximum(facts.trace.column("skipped")[rows] - facts.trace.left_out(rows), 0.0)))
    halvings = 0.0
    step = facts.onset
    if scale_known.sum() >= 2:
        known = scale[scale_known]
        lowest = int(np.argmin(known))
        top = float(np.max(known[: lowest + 1]))
        halvings = float(np.log2(top / known[lowest])) if known[lowest] > 0 else np.inf
        step = int(steps[scale_known][lowest])
    if halvings < HALVINGS and skipped < HALVINGS:
        return []
    says = f"The loss scale fell by {counted(halvings, 'halving')} and {counted(skipped, 'step')} skipped around the onset."
    weight = COLLAPSED if halvings >= COLLAPSE else 0.4
    if skipped >= max(STUCK, PART * stride * facts.records):
        weight = USELESS
    return [Finding(kind="loss_scale", step=step, cause="numeric", weight=weight, says=says)]
