"""A rule says itself what it speaks for, by its label ``cause``: an invariant that only one thing can break.

Ids beyond the vocabulary are the data's (case A41), a balance loss below its floor the model's (case A26). A rule may be wrong,
so it decides nothing alone against better evidence. What grows in the model is a cause where it grew before the loss rose; behind a risen
loss weights, activations and logits grow whatever made it rise. Several rules that name one cause mostly look at the same numbers at several
heights: the first of those that weigh most is the witness, and the others only inform.
"""

from __future__ import annotations

import math

from msgspec.structs import replace

from trainwarden.rules.core.facts import CAUSES, Evidence, Facts, Finding

#: What is said where this line looked and found nothing.
CLEAR = "None of the alerts names a cause by itself."

#: What a rule's own word weighs, and on the model where it began to hold only behind the first of several high losses.
WEIGHT, LATE = 0.8, 0.2
#: High losses behind which a rise is no news: a rule with a window may see its own a few records late.
RISEN = 15


def find(facts: Facts) -> Evidence:
    """Return a finding for each rule of the incident that names a cause."""
    found: list[Finding] = []
    for rule, cause, since, value in facts.blamed:
        if cause in CAUSES:
            compared = "" if value is None else f" at {value:.6g}"
            says = f"{rule} fired{compared}, which speaks for {cause.replace('_', ' ')}"
            late = cause == "model" and _risen(facts) < since
            says += f", but only from step {since} on, when the loss had risen." if late else "."
            weight = LATE if late else WEIGHT
            heard = max((one.weight for one in found if one.cause == cause), default=0.0)
            if heard >= weight:
                weight = 0.0
            elif heard:
                found = [replace(one, weight=0.0) if one.cause == cause else one for one in found]
            found.append(Finding(kind="rule", step=since, cause=cause, weight=weight, says=says))
    return found


def _risen(facts: Facts) -> float:
    """Return the step by which the loss had been high several times, infinite where it was not."""
    high = facts.steps[facts.loss_high]
    return float(high[RISEN - 1]) if len(high) >= RISEN else math.inf
