"""What a post-mortem asks for, as one object of an incident's row: null where it is unknown (case F04).

The numbers are those of the records; words are the incident's own. What would be the smallest change follows the cause (design §4.6).
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from .onset_numbers import as_row
from .state import Incident

#: The smallest change that takes a cause away (design §4.6), where no plan says it.
SMALLEST: Mapping[str, str] = MappingProxyType(
    {
        "data": "Leave out the samples of the onset, and change nothing else.",
        "learning_rate": "Go on from before the onset with half the learning rate and a new warm-up.",
        "numeric": "Mend the precision first: the onset's step in float32 or bfloat16, or a smaller loss scale.",
        "optimizer_state": "Go on from before the onset with the optimizer reset and a short warm-up.",
        "distributed": "Compare the ranks' parameters and test the collectives before anything starts there again.",
        "hardware": "Leave out the host that is suspect, and repeat the steps with the same data.",
        "model": "Change the recipe where it grows: a person decides; a rollback alone repeats it.",
        "instrument": "Mend what measures: the training needs no change.",
        "planned_change": "None, if the change was meant: what follows it is learned anew.",
    }
)
#: What to do where no cause is named (case F04).
UNCLEAR = (
    "Go back 10 to 100 steps before the onset and pass it with other data or a lower rate; watch the gradient norm."
)


def post_mortem(incident: Incident) -> dict[str, Any]:
    """Return what a post-mortem asks for as one object; null is unknown."""
    good = incident.last_good
    ranked = sorted(incident.scores.items(), key=lambda one: (-one[1], one[0]))
    return {
        "step": incident.onset,
        **as_row(incident.numbers),
        "epoch": incident.suspect_epoch if incident.suspect_samples else None,
        "last_good": None if good is None else {"attempt": good.attempt, "step": good.step, "path": good.path},
        "hypotheses": [
            {
                "cause": cause,
                "score": score,
                "because": _because(incident, cause, 1),
                "against": _because(incident, cause, -1),
            }
            for cause, score in ranked
        ],
        "test": incident.cheapest_test or None,
        "conclusion": incident.summary or None,
        "smallest_change": _smallest(incident),
        "verified": _verified(incident),
        "advice": UNCLEAR if incident.cause == "undetermined" and incident.state != "recovered" else None,
    }


def _because(incident: Incident, cause: str, sign: int) -> list[str]:
    return list(dict.fromkeys(one.says for one in incident.findings if one.cause == cause and one.weight * sign > 0))


def _smallest(incident: Incident) -> str | None:
    if incident.state == "recovered" and incident.plan is None:
        return "None: it healed by itself."
    if incident.plan is not None:
        said = [why for name, why in incident.plan.reasons.items() if name != "anomaly"]
        return " ".join(said) or None
    return SMALLEST.get(incident.cause)


def _verified(incident: Incident) -> str | None:
    """Return what the attempt under the plan showed, None where there was none or it has not come to an end."""
    if incident.verification is None or incident.state not in (
        "recovered",
        "not_recovered",
        "inconclusive",
        "escalated",
    ):
        return None
    return f"{incident.state}: {incident.timeline[-1].says}" if incident.timeline else incident.state
