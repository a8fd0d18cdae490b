"""The reduced gradient is not what the ranks' own gradients give: something was lost or added on the way (case A25).

The mean of gradients is no longer than the longest of them. How much shorter differs from run to run and does not jump tenfold.
"""

from __future__ import annotations

import numpy as np

from trainwarden.rules.core.facts import Evidence, Facts, Finding, NotPossible

#: What is said where this line looked and found nothing.
CLEAR = "The reduced gradient stands to the rank's own as before the onset."
#: Records before the onset that tell what is usual, those since it that must be off, and the factor.
USUAL, SINCE, OFF = 20, 3, 10.0
#: What it weighs, and the rule that sees the same with all ranks: where it spoke there is no second witness.
WEIGHT, RULE = 0.6, "TrainingReductionOff"


def find(facts: Facts) -> Evidence:
    """Return a finding where the ratio of the reduced norm to the first rank's own left its range tenfold."""
    if facts.whose.of_ranks < 2:
        return NotPossible("one rank only")
    own = facts.trace.column("rank_grad_norm")
    if not np.isfinite(own).any():
        return NotPossible(
            "the ranks' own gradient norms are not recorded; where the gradient is sharded they cannot be seen"
        )
    with np.errstate(divide="ignore", invalid="ignore"):
        gain = facts.trace.column("grad_norm") / own
    first = len(facts.trace) - len(facts.steps)
    before, since = gain[:first], gain[first:]
    before, since = before[np.isfinite(before)][-200:], since[np.isfinite(since)]
    if len(before) < USUAL or len(since) < SINCE:
        return NotPossible("too few of the ranks' own gradient norms are recorded around the onset")
    off = (since > OFF * float(np.max(before))) | (since < float(np.min(before)) / OFF)
    if int(np.count_nonzero(off)) < SINCE:
        return []
    now, usual = float(np.median(since[off])), float(np.median(before))
    says = f"The reduced gradient norm is {now:.3g} times the rank's own since the onset, {usual:.3g} times before: the reduction is off."
    weight = 0.0 if any(name == RULE for name, _, _, _ in facts.blamed) else WEIGHT
    return [Finding(kind="reduced_norm", step=facts.onset, cause="distributed", weight=weight, says=says)]
