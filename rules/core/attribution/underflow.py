"""Numbers became too small for their format: elements of the gradient that are exactly zero, or updates that change no parameter.

Sources: arXiv 1710.03740 (gradients below the range of fp16 become zero without a loss scale), case A27 (updates swallowed by bfloat16).
A dirty batch leaves zeros as well, in the embedding: where the batches look odd, zeros say nothing.
"""

from __future__ import annotations

import numpy as np

from trainwarden.rules.core.baseline import baseline
from trainwarden.rules.core.facts import Evidence, Facts, Finding, NotPossible

#: What is said where this line looked and found nothing.
CLEAR = "No larger share of the gradient is zero than before the onset, and the parameters take the updates."
#: Steps before the onset that still count.
NEAR = 20
#: Share of zeros, and by how much it must have grown.
ZEROS, MORE = 0.5, 0.2
#: Part of the intended update that arrives: below the first it is swallowed, where before it was above the second.
SWALLOWED, ARRIVED = 0.5, 0.8
#: Measurements that tell what arrives, and what either weighs.
ENOUGH, WEIGHT = 3, 0.4


def find(facts: Facts) -> Evidence:
    """Return findings for zeros in the gradient and for updates that do not arrive."""
    zeros, applied = facts.trace.measured("grad_zero_ratio"), facts.trace.measured("update_applied_ratio")
    if not zeros.any() and not applied.any():
        return NotPossible("neither zeros of the gradient nor applied updates are recorded")
    if facts.dirty.any():
        return NotPossible("the batches look odd, which leaves zeros in the gradient too")
    return [*_zeros(facts), *_swallowed(facts)]


def _zeros(facts: Facts) -> list[Finding]:
    usual = baseline(facts.before("grad_zero_ratio"))
    rows = facts.trace.rows(facts.onset - NEAR * facts.trace.stride(), facts.now + 1)
    values = facts.trace.column("grad_zero_ratio")[rows]
    known = np.flatnonzero(np.isfinite(values))
    if usual is None or not len(known):
        return []
    high = known[values[known] >= max(ZEROS, usual.median + MORE)]
    if not len(high):
        return []
    step, share = int(facts.trace.steps[rows][high[0]]), float(values[high[0]])
    says = f"{100 * share:.0f} % of the gradient's elements are exactly zero at step {step}, usually {100 * usual.median:.0f} %: they underflow."
    return [Finding(kind="underflow", step=step, cause="numeric", weight=WEIGHT, says=says)]


def _swallowed(facts: Facts) -> list[Finding]:
    with np.errstate(divide="ignore", invalid="ignore"):
        arrives = facts.trace.column("update_applied_ratio") / facts.trace.column("update_ratio")
    first = len(facts.trace) - len(facts.steps)
    before, since = arrives[:first], arrives[first:]
    before, since = before[np.isfinite(before)], since[np.isfinite(since)]
    if len(before) < ENOUGH or len(since) < ENOUGH:
        return []
    usual, now = float(np.median(before)), float(np.median(since))
    if usual < ARRIVED or now > SWALLOWED:
        return []
    says = f"Of the intended update {100 * now:.0f} % arrive in the parameters since the onset, {100 * usual:.0f} % before: rounding takes the rest."
    return [Finding(kind="underflow", step=facts.onset, cause="numeric", weight=WEIGHT, says=says)]
