"""The attempt runs with other versions, settings or hosts than the one before it (case F01).

That is no cause by itself, and says what was changed since things were well: the first thing that a person asks.
"""

from __future__ import annotations

from trainwarden.rules.core.facts import Evidence, Facts, Finding, NotPossible

#: What is said where this line looked and found nothing.
CLEAR = "The attempt runs with the versions, settings and hosts of the one before it."


def find(facts: Facts) -> Evidence:
    """Return what is another one, as information; it weighs nothing."""
    if facts.environment is None:
        return NotPossible("no attempt before this one told what it ran with")
    if not facts.environment:
        return []
    says = f"Since the attempt began it runs otherwise than the one before it: {facts.environment}."
    return [Finding(kind="environment", step=facts.first_step, says=says)]
