"""A rule says itself what it speaks for, by its label ``cause``: an invariant that only one thing can break.

Ids beyond the vocabulary are the data's (case A41), a balance loss below its floor the model's (case A26). A rule may be wrong,
so it decides nothing alone against better evidence.
"""

from __future__ import annotations

from trainwarden.rules.core.facts import CAUSES, Evidence, Facts, Finding

#: What is said where this line looked and found nothing.
CLEAR = "None of the alerts names a cause by itself."

#: What a rule's own word weighs.
WEIGHT = 0.8


def find(facts: Facts) -> Evidence:
    """Return a finding for each rule of the incident that names a cause."""
    found = []
    for rule, cause, since, value in facts.blamed:
        if cause in CAUSES:
            compared = "" if value is None else f" at {value:.6g}"
            says = f"{rule} fired{compared}, which speaks for {cause.replace('_', ' ')}."
            found.append(Finding(kind="rule", step=since, cause=cause, weight=WEIGHT, says=says))
    return found
