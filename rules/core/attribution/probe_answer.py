"""A probe made the steps around this onset again: what it showed is the best evidence there is (design §4.8; cases A24, A38, A39).

An experiment outweighs what was only inferred: what speaks otherwise of a cause that it decides is shown and does not count. A batch may look
like the others and be bad all the same.
"""

from __future__ import annotations

from collections.abc import Sequence

from msgspec import structs

from trainwarden.rules.core.facts import Evidence, Facts, Finding, NotPossible

#: What is said where this line looked and found nothing.
CLEAR = "No probe asked about this step."

#: Steps by which two onsets may differ and still be the same step; a record may cover several.
NEAR = 3


def find(facts: Facts) -> Evidence:
    """Return what the newest probe about this step says for and against causes."""
    if not facts.probed:
        return NotPossible("no probe was made")
    near = max(NEAR * facts.trace.stride(), facts.uncertainty)
    for one in reversed(facts.probed):
        if abs(one.onset - facts.onset) > near:
            continue
        if one.answer == "unclear":
            return NotPossible("the probe that asked about this step does not tell")
        return [
            Finding(kind="probe", step=one.onset, cause=cause, weight=weight, says=one.says)
            for cause, weight in one.weights.items()
        ]
    return []


def outweigh(findings: Sequence[Finding]) -> list[Finding]:
    """Return the findings, without the weight of those that contradict a probe's."""
    told = {one.cause: one.weight for one in findings if one.kind == "probe" and one.weight}
    return [
        structs.replace(one, weight=0.0) if one.kind != "probe" and one.weight * told.get(one.cause, 0.0) < 0 else one
        for one in findings
    ]
