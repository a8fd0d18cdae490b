"""What must be one number on all ranks is not, or what must differ is one: the communication, or the sampler (design §4.11).

Sources: cases A25 (a collective returned wrong values on one rank), A22 (all ranks read the same samples).
"""

from __future__ import annotations

import numpy as np

from trainwarden.rules.core.counted import counted
from trainwarden.rules.core.facts import Evidence, Facts, Finding, NotPossible
from trainwarden.rules.core.machines import listed

#: What is said where this line looked and found nothing.
CLEAR = "What all ranks must share is the same on all of them, and what must differ does."

#: Causes that a difference between the ranks speaks against.
AGAINST = ("data", "numeric", "learning_rate", "optimizer_state", "model")
#: Records in which ranks must disagree, and in which they must have had the same loss.
DISAGREE, SAME = 3, 50
#: Share of the records that may be abnormal where ranks have read the same: more of them are another event.
ODD = 0.1


def _drift(facts: Facts) -> list[Finding]:
    """The bits of the parameters are not those of the other ranks: an update was lost or wrong, or a bit of memory fell over."""
    drift = facts.whose.apart.get("drift")
    if drift is None:
        return []
    if drift.ranks:
        who = f"The parameters of rank {listed([str(rank) for rank in drift.ranks])}{_where(facts)} are not those of the others"
    else:
        who = "The parameters are not the same on all ranks"
    says = f"{who}, at {counted(drift.records, 'hash')} since step {drift.step}: the ranks no longer train one model."
    test = (
        "Compare the parameters tensor by tensor between a rank that differs and one that does not: one tensor, it is memory; all, an "
        "update or a broadcast that did not reach it. Run the memory test of its device."
    )
    return [
        Finding(kind="ranks_disagree", step=drift.step, cause="distributed", weight=0.85, says=says, test=test),
        Finding(
            kind="ranks_disagree", step=drift.step, cause="hardware", weight=0.35 if drift.ranks else 0.0, says=says
        ),
        *(Finding(kind="ranks_disagree", step=drift.step, cause=cause, weight=-0.6, says=says) for cause in AGAINST),
    ]


def _weights(facts: Facts) -> list[Finding]:
    """Weights that no parallelism splits are not the same on all ranks: a clip or a reduction that some of them left out (case D01)."""
    apart = facts.whose.apart.get("weights")
    if apart is None:
        return []
    where = f"rank {listed([str(rank) for rank in apart.ranks])}{_where(facts)}" if apart.ranks else "all ranks"
    says = (
        f"The weights of the normalisation layers of {where} are not those of the others, in {counted(apart.records, 'record')} since step "
        f"{apart.step}: what holds them equal, clipping or a reduction, does not reach every rank. The loss need not show it."
    )
    test = "Compare the weights of the normalisation layers tensor by tensor between two ranks, and what was clipped on each."
    return [
        Finding(kind="weights_apart", step=apart.step, cause="distributed", weight=0.85, says=says, test=test),
        *(Finding(kind="weights_apart", step=apart.step, cause=cause, weight=-0.6, says=says) for cause in AGAINST),
    ]


def _duplicate(facts: Facts) -> list[Finding]:
    """Some ranks, and not all, read the same samples."""
    twins = facts.whose.apart.get("duplicate")
    if twins is None or not twins.ranks:
        return []
    ranks = listed([str(rank) for rank in twins.ranks])
    says = f"Ranks {ranks} have read the same samples in {counted(twins.records, 'record')} since step {twins.step}."
    return [
        Finding(kind="same_on_some_ranks", step=twins.step, cause="data", weight=0.6, says=says),
        Finding(kind="same_on_some_ranks", step=twins.step, cause="distributed", weight=0.4, says=says),
    ]


def _where(facts: Facts) -> str:
    return f" (on {listed(facts.whose.hosts)})" if facts.whose.hosts else ""


def find(facts: Facts) -> Evidence:
    """Return findings where a rule found a mismatch and the ranks' own records show of what kind."""
    whose = facts.whose
    if whose.of_ranks < 2 and "mismatch" not in facts.offered:
        return NotPossible("one rank only")
    if "mismatch" not in facts.offered:
        return []
    found = [*_drift(facts), *_weights(facts), *_duplicate(facts)]
    if found:
        return found
    if whose.differing >= DISAGREE:
        ranks = listed([str(rank) for rank in whose.differ])
        where = f" (on {listed(whose.hosts)})" if whose.kind == "shared" and whose.hosts else ""
        who = f"that of rank {ranks}{where} is not the one of the others" if whose.differ else "no two agree on it"
        says = (
            f"The gradient norm after its reduction is not one number over {counted(whose.differing, 'record')}: {who}."
        )
        return [
            Finding(kind="ranks_disagree", step=whose.step, cause="distributed", weight=0.85, says=says),
            *(
                Finding(kind="ranks_disagree", step=whose.step, cause=cause, weight=-0.6, says=says)
                for cause in AGAINST
            ),
        ]
    if whose.same >= SAME and float(np.mean(facts.loss_high | facts.grad_high)) <= ODD:
        says = f"All ranks have had the same loss for {counted(whose.same, 'record')}: they read the same samples."
        return [
            Finding(kind="same_on_all_ranks", step=facts.now, cause="distributed", weight=0.75, says=says),
            Finding(kind="same_on_all_ranks", step=facts.now, cause="data", weight=0.3, says=says),
        ]
    return []
