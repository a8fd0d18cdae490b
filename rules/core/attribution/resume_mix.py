"""The batches right behind the resume are made up otherwise than before: the loss moves with them, and nothing is broken (case A07)."""

from __future__ import annotations

from trainwarden.rules.core.facts import Evidence, Facts, Finding, NotPossible

#: What is said where this line looked and found nothing.
CLEAR = "The batches near the onset are not the first ones behind a resume, or they are made up as before."

#: Steps after a resume within which its first batches explain an onset.
NEAR = 60


def find(facts: Facts) -> Evidence:
    """Return findings for the data and against the optimizer where a signal of the batch began otherwise."""
    if facts.resumed_from is None:
        return NotPossible("this start did not resume from a checkpoint")
    if facts.onset - facts.resumed_from > NEAR * facts.trace.stride():
        return []
    if facts.planned.leaves_out("sample_position"):
        return NotPossible("the plan changed the data on purpose")
    found: list[Finding] = []
    for one in facts.moved[:1]:
        says = (
            f"{one.name} is {one.early:.3g} in the first records behind the resume and was {one.usual:.3g} before: "
            "the batches are made up otherwise, as where a loader fills anew."
        )
        step = facts.resumed_from + 1
        found.append(Finding(kind="resume_mix", step=step, cause="data", weight=0.7, says=says))
        against = "A bump that comes with other batches needs no other cause."
        found.append(Finding(kind="resume_mix", step=step, cause="optimizer_state", weight=-0.4, says=against))
    return found
