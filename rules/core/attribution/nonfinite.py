"""A value that is not finite came first: before it, loss and gradient were usual.

An overflow in the forward or backward pass looks like this; so does a batch without targets (zero divided by zero), which the
fingerprint's line speaks of.
"""

from __future__ import annotations

import numpy as np

from trainwarden.rules.core.broken import sentence
from trainwarden.rules.core.facts import Evidence, Facts, Finding, NotPossible

#: What is said where this line looked and found nothing.
CLEAR = "Loss and gradient norm are finite since the onset."


def find(facts: Facts) -> Evidence:
    """Return a finding where the first abnormal record is a non-finite one, and the module that was the first, where one is known."""
    if not (facts.loss_measured.any() or facts.trace.measured("grad_norm")[facts.rows].any()):
        return NotPossible("neither loss nor gradient norm is recorded since the onset")
    found = _of_values(facts)
    if facts.broken:
        found.append(Finding(kind="first_module", step=facts.broken[0].step, says=sentence(facts.broken)))
    return found


def _of_values(facts: Facts) -> list[Finding]:
    """Return a finding where the first abnormal record is a non-finite one."""
    grad = facts.trace.column("grad_norm")[facts.rows]
    grad_bad = facts.trace.measured("grad_norm")[facts.rows] & ~np.isfinite(grad)
    bad = facts.nonfinite | grad_bad
    if not bad.any():
        return []
    place = int(np.argmax(bad))
    step = int(facts.steps[place])
    what = "loss" if facts.nonfinite[place] else "gradient norm"
    odd_before = bool((facts.loss_high[:place] | facts.grad_high[:place]).any())
    if odd_before:
        return [
            Finding(
                kind="nonfinite",
                step=step,
                says=f"The {what} is not finite at step {step}, after loss or gradient had grown.",
            )
        ]
    supervised = facts.trace.column("batch_supervised_tokens")[facts.rows][place]
    if supervised == 0:
        return [
            Finding(
                kind="nonfinite",
                step=step,
                cause="data",
                weight=0.8,
                says=f"The {what} is not finite at step {step}, whose batch has no supervised token.",
            )
        ]
    return [
        Finding(
            kind="nonfinite",
            step=step,
            cause="numeric",
            weight=0.6,
            says=f"The {what} turned non-finite at step {step} from one record to the next, out of usual values.",
        )
    ]
