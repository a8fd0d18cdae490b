"""The routers of a mixture of experts left their range before the onset: logits that grow, experts that die (docs/moe.md).

Source: arXiv 2202.08906 (large router logits make training unstable; a loss on them ends it).
"""

from __future__ import annotations

import numpy as np

from trainwarden.rules.core.baseline import above, baseline
from trainwarden.rules.core.facts import Evidence, Facts, Finding, NotPossible

#: What is said where this line looked and found nothing.
CLEAR = "Router logits are what they were up to the onset, and no expert died."
#: Steps before the onset that count as its beginning; measurements may be farther apart.
NEAR = 30
#: Router logits are out of their range above both of these.
SDS, FACTOR = 6.0, 1.5
#: What it weighs.
WEIGHT = 0.4


def find(facts: Facts) -> Evidence:
    """Return a finding for router logits that left their range by the onset, or for experts that died."""
    if not facts.trace.measured("router_z").any() and not facts.trace.measured("dead_experts").any():
        return NotPossible("no router is recorded: no mixture of experts, or none that is watched")
    stride = facts.trace.stride()
    near = max(NEAR * stride, 2 * facts.trace.cadence("router_z"))
    before, around = facts.trace.rows(0, facts.onset - near), facts.trace.rows(facts.onset - near, facts.onset + stride)
    says, step = "", facts.onset
    logits = facts.trace.column("router_z")
    usual = baseline(logits[before])
    high = np.flatnonzero(np.isfinite(logits[around]) & above(logits[around], usual, SDS, FACTOR))
    if usual is not None and len(high):
        step = int(facts.trace.steps[around][high[0]])
        says = f"Router logits reached {logits[around][high[0]]:.3g} at step {step}, usually {usual.median:.3g}."
    dead = facts.trace.column("dead_experts")
    earlier, now = dead[before], dead[around]
    earlier, now = earlier[np.isfinite(earlier)], now[np.isfinite(now)]
    if not says and len(earlier) and len(now) and float(np.max(now)) > float(np.max(earlier)):
        says = f"{np.max(now):.0f} experts had no token by the onset, {np.max(earlier):.0f} at most before."
    if not says:
        return []
    spoken = any(cause == "model" for _, cause, _, _ in facts.blamed)  # a rule on the same numbers is no second witness
    return [Finding(kind="router", step=step, cause="model", weight=0.0 if spoken else WEIGHT, says=says)]
