"""Attention logits had grown before the onset: a softmax that saturates passes no gradient on, and narrow formats overflow.

Sources: arXiv 2302.05442 (training diverges where logits grow without bound; a norm on queries and keys ends it), arXiv 2309.14322, case A10.
"""

from __future__ import annotations

import numpy as np

from trainwarden.rules.core.facts import Evidence, Facts, Finding, NotPossible

#: What is said where this line looked and found nothing.
CLEAR = "Attention logits had not grown before the onset."
#: Columns, the better one first.
SEEN = ("attention_logit_sampled", "attention_logit_lse")
#: Growth over what they were, and the size below which a softmax bears any growth.
GROWN, LARGE = 3.0, 50.0
#: Measurements that tell.
ENOUGH = 6
#: What it weighs for the model, and for the numerics where the loss is not finite.
MODEL, NUMERIC = 0.35, 0.3


def find(facts: Facts) -> Evidence:
    """Return findings where the logits up to the onset are several times what they were in the first half of what is remembered."""
    name = next((one for one in SEEN if facts.trace.measured(one).any()), None)
    if name is None:
        return NotPossible("no attention logit is recorded")
    row = facts.trace.row(facts.onset + 1)
    values, steps = facts.trace.column(name)[:row], facts.trace.steps[:row]
    known = np.isfinite(values)
    values, steps = values[known], steps[known]
    if len(values) < ENOUGH:
        return NotPossible(f"fewer than {ENOUGH} measurements of attention logits lie before the onset")
    usual = float(np.median(values[: len(values) // 2]))
    newest = float(np.max(values[-2:]))
    if newest < LARGE or newest < GROWN * max(usual, 1e-12):
        return []
    says = f"Attention logits had grown to {newest:.3g} by the onset, from {usual:.3g}: the softmax saturates."
    spoken = any(cause == "model" for _, cause, _, _ in facts.blamed)  # a rule on the same numbers is no second witness
    found = [
        Finding(kind="attention_logits", step=int(steps[-1]), cause="model", weight=0.0 if spoken else MODEL, says=says)
    ]
    if facts.nonfinite.any():
        found.append(Finding(kind="attention_logits", step=int(steps[-1]), cause="numeric", weight=NUMERIC, says=says))
    return found
