"""One step raised the optimizer's second moment: its updates are too small, or lopsided, until the moment has forgotten it.

A single huge gradient stays in the moment for 1/(1 - beta2) steps. Where the batches look odd the raise is what they did, and no cause.
Source: arXiv 2501.06842 (spikes of the gradient stay in Adam's moments and harm the steps behind them).
"""

from __future__ import annotations

import numpy as np

from trainwarden.rules.core.counted import counted
from trainwarden.rules.core.facts import Evidence, Facts, Finding, NotPossible

#: What is said where this line looked and found nothing.
CLEAR = "The second moment was not raised by one step around the onset, or the batches explain it."
#: Steps around the onset within which the raise counts; the measurements may be farther apart.
NEAR = 20
#: Growth from one measurement to the next, and how much it may still grow behind.
RAISED, STILL = 2.0, 1.05
#: Part of the usual update below which the moment holds it down.
SMALL = 0.7
#: What it weighs where the update is held down, and where that is not seen.
HELD, ALONE = 0.5, 0.3


def find(facts: Facts) -> Evidence:
    """Return a finding where the second moment jumped near the onset and did not go on growing."""
    known = np.flatnonzero(facts.trace.measured("exp_avg_sq"))
    if len(known) < 4:
        return NotPossible("the second moment is not recorded, or fewer than four times")
    values, steps = facts.trace.column("exp_avg_sq")[known], facts.trace.steps[known]
    near = max(NEAR * facts.trace.stride(), 2 * facts.trace.cadence("exp_avg_sq"))
    with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
        ratios = values[1:] / values[:-1]
    places = np.flatnonzero((ratios > RAISED) & (np.abs(steps[1:] - facts.onset) <= near)) + 1
    if not len(places) or facts.dirty.any():
        return []
    place = int(places[0])
    if len(values) <= place + 1:
        return NotPossible("the second moment was not measured again since it was raised")
    if float(np.max(values[place + 1 :])) > STILL * float(values[place]):
        return []
    step, beta2 = int(steps[place]), facts.beta2
    memory = (
        f", for about {counted(1 / (1 - beta2), 'step')} at beta2 {beta2:g}" if beta2 is not None and beta2 < 1 else ""
    )
    says = f"The second moment grew {ratios[place - 1]:.2g} times up to step {step} and falls since: one step is in it{memory}."
    return [
        Finding(
            kind="moment_jump",
            step=step,
            cause="optimizer_state",
            weight=HELD if _held(facts, step) else ALONE,
            says=says,
        )
    ]


def _held(facts: Facts, step: int) -> bool:
    """Say whether the update is below what it was since the raise."""
    usual = facts.usual.get("update_ratio")
    values = facts.trace.column("update_ratio")[facts.trace.row(step + 1) :]
    values = values[np.isfinite(values)]
    return usual is not None and len(values) > 2 and float(np.median(values)) < SMALL * usual.median
