"""What must be one number on all ranks is not, or what must differ is one: the communication, or the sampler (design §4.11).

Sources: cases A25 (a collective returned wrong values on one rank), A22 (all ranks read the same samples).
"""

from __future__ import annotations

from trainwarden.rules.core.counted import counted
from trainwarden.rules.core.facts import Facts, Finding
from trainwarden.rules.core.machines import listed

#: Records in which ranks must disagree, and in which they must have had the same loss.
DISAGREE, SAME = 3, 50


def find(facts: Facts) -> list[Finding]:
    """Return findings where a rule found a mismatch and the ranks' own records show of what kind."""
    whose = facts.whose
    if "mismatch" not in facts.offered:
        return []
    if whose.differing >= DISAGREE:
        ranks = listed([str(rank) for rank in whose.differ])
        where = f" (on {listed(whose.hosts)})" if whose.kind == "shared" and whose.hosts else ""
        who = f"that of rank {ranks}{where} is not the one of the others" if whose.differ else "no two agree on it"
        says = (
            f"The gradient norm after its reduction is not one number over {counted(whose.differing, 'record')}: {who}."
        )
        against = ("data", "numeric", "learning_rate", "optimizer_state", "model")
        return [
            Finding(kind="ranks_disagree", step=whose.step, cause="distributed", weight=0.85, says=says),
            *(
                Finding(kind="ranks_disagree", step=whose.step, cause=cause, weight=-0.6, says=says)
                for cause in against
            ),
        ]
    if whose.same >= SAME and not (facts.loss_high.any() or facts.grad_high.any()):
        says = f"All ranks have had the same loss for {counted(whose.same, 'record')}: they read the same samples."
        return [
            Finding(kind="same_on_all_ranks", step=facts.now, cause="distributed", weight=0.75, says=says),
            Finding(kind="same_on_all_ranks", step=facts.now, cause="data", weight=0.3, says=says),
        ]
    return []
