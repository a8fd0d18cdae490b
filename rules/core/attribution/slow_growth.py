"""Weights or activations doubled, and did not slow down, long before the onset: a model on its way to a limit, whatever step came last.

Weights grow in every young run, and ever more slowly; what doubles and goes on is another thing. Sources: cases A03 and A32.
"""

from __future__ import annotations

import numpy as np

from trainwarden.rules.core.facts import Evidence, Facts, Finding, NotPossible

#: What is said where this line looked and found nothing.
CLEAR = "Neither weights nor activations doubled before the onset without slowing down."
SEEN = ("weight_rms", "activation_absmax")
#: Steps before the onset that are the incident's own beginning, and measurements that tell.
OWN, ENOUGH = 30, 15
#: Growth from the first third of the measurements to the last, and from the second to the last.
GROWN, LATELY = 2.0, 1.4
#: Part of the growth before that the growth since must reach: what slows down is a young run.
STEADY = 0.9
#: What it weighs.
WEIGHT = 0.3


def find(facts: Facts) -> Evidence:
    """Return a finding for each of the signals that grew without slowing down."""
    seen = [name for name in SEEN if facts.trace.measured(name).any()]
    if not seen:
        return NotPossible("neither the size of the weights nor of the activations is recorded")
    found: list[Finding] = []
    told = False
    spoken = any(cause == "model" for _, cause, _, _ in facts.blamed)  # a rule on the same numbers is no second witness
    for name in seen:
        row = facts.trace.row(facts.onset - OWN * facts.trace.stride())
        values, steps = facts.trace.column(name)[:row], facts.trace.steps[:row]
        known = np.isfinite(values) & (values > 0)
        values, steps = values[known], steps[known]
        if len(values) < ENOUGH:
            continue
        told = True
        first, second, last = (float(np.median(part)) for part in np.array_split(values, 3))
        if last >= GROWN * first and last >= LATELY * second and last / second >= STEADY * second / first:
            says = f"{name} grew from {first:.3g} to {last:.3g} over the steps {int(steps[0])} to {int(steps[-1])}, as fast at the end as before."
            weight = 0.0 if spoken or found else WEIGHT
            found.append(Finding(kind="slow_growth", step=int(steps[0]), cause="model", weight=weight, says=says))
    return (
        found
        if told
        else NotPossible(f"fewer than {ENOUGH} measurements of weights or activations lie before the onset")
    )
