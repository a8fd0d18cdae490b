"""Gradient or update all but vanished while the loss slopes up: the optimizer no longer follows what the loss asks for.

A gradient that gets small while the loss falls is convergence; both together are none. Where the update alone vanished under the same
rate, the moments hold it down; where the gradient did, the model passes nothing on. Source: docs/rules/TrainingGradCollapse.md.
"""

from __future__ import annotations

import numpy as np

from trainwarden.rules.core.facts import Evidence, Facts, Finding, NotPossible

#: What is said where this line looked and found nothing.
CLEAR = "Neither gradient nor update collapsed while the loss rose."
#: Part of the usual value that is a collapse, and measurements that must be below it.
COLLAPSED, ENOUGH = 0.3, 5
#: Records over which the loss must have risen, and the part of the rate that must be left: a rate that fell explains a small update.
RISES, RATE = 20, 0.5
#: What a collapse of the update alone weighs, and one of the gradient.
UPDATE, GRADIENT = 0.6, 0.4


def find(facts: Facts) -> Evidence:
    """Return a finding for an update that collapsed, or else for a gradient that did."""
    seen: list[str] = [name for name in ("update_ratio", "grad_norm") if name in facts.usual]
    if not seen:
        return NotPossible("neither gradient norm nor update ratio is recorded often enough before the onset")
    if facts.trend is None:
        return NotPossible("there is no trend of the loss before the onset")
    if facts.records < RISES:
        return NotPossible(f"fewer than {RISES} records since the onset: whether the loss slopes up is not told yet")
    if not _rises(facts) or _rate_fell(facts):
        return []
    low: dict[str, float | None] = {name: _collapsed(facts, name) for name in seen}
    for name, weight in (("update_ratio", UPDATE), ("grad_norm", GRADIENT)):
        share = low.get(name)
        if share is None:
            continue
        says = f"{name} is {100 * share:.0f} % of what it was before the onset, under the same learning rate, while the loss rises."
        return [Finding(kind="collapse", step=facts.onset, cause="optimizer_state", weight=weight, says=says)]
    return []


def _collapsed(facts: Facts, name: str) -> float | None:
    """Return which part of its usual value a signal has in its newest measurements; None where it did not collapse."""
    usual = facts.usual[name].median
    values = facts.trace.column(name)[facts.rows]
    values = values[np.isfinite(values)][-ENOUGH:]
    if len(values) < ENOUGH or usual <= 0:
        return None
    share = float(np.median(values)) / usual
    return share if share < COLLAPSED and float(np.max(values)) < usual else None


def _rises(facts: Facts) -> bool:
    """Say whether the loss lies above its trend in most of the newest records, and the more the later."""
    excess = facts.excess[-max(RISES, 2 * RISES) :]
    excess = excess[np.isfinite(excess)]
    if len(excess) < RISES // 2:
        return False
    half = len(excess) // 2
    older, newer = float(np.median(excess[:half])), float(np.median(excess[half:]))
    return newer > 1.0 and newer > older


def _rate_fell(facts: Facts) -> bool:
    before, since = facts.before("lr", 20), facts.trace.column("lr")[facts.rows]
    since = since[np.isfinite(since)]
    return bool(len(before) and len(since) and float(np.median(since[-ENOUGH:])) < RATE * float(np.median(before)))
