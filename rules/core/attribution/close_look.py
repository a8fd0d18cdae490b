"""A step that was looked at closely says which operation, on which line, made the first value that is not finite.

What the model was given speaks for the data; the rest names a place and weighs nothing: an overflow is where it is, whatever led to it.
"""

from __future__ import annotations

from trainwarden.rules.core.facts import Facts, Finding
from trainwarden.rules.core.looked import sentence


def find(facts: Facts) -> list[Finding]:
    """Return a finding where a close look found something at the onset or behind it."""
    if not facts.looked:
        return []
    one, says = facts.looked[0], sentence(facts.looked)
    if one.stage == "input":
        return [Finding(kind="close_look", step=one.step, cause="data", weight=0.7, says=says)]
    return [Finding(kind="close_look", step=one.step, says=says)]
