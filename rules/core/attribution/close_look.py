"""A step that was looked at closely says which operation, on which line, made the first value that is not finite.

What the model was given speaks for the data; the rest names a place and weighs nothing: an overflow is where it is, whatever led to it.
"""

from __future__ import annotations

from trainwarden.rules.core.facts import Evidence, Facts, Finding, NotPossible
from trainwarden.rules.core.looked import sentence

#: What is said where this line looked and found nothing.
CLEAR = "A close look found nothing that is not finite."


def find(facts: Facts) -> Evidence:
    """Return a finding where a close look found something at the onset or behind it."""
    if not facts.looked:
        return NotPossible("no step around the onset was looked at closely, or it found all finite")
    one, says = facts.looked[0], sentence(facts.looked)
    if one.stage == "input":
        return [Finding(kind="close_look", step=one.step, cause="data", weight=0.7, says=says)]
    return [Finding(kind="close_look", step=one.step, says=says)]
