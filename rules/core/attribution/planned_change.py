"""The onset lies in the burn-in of a planned change, or shortly behind it (cases B03, B08).

Alerts that the change excuses open nothing; what opened nonetheless, a value that is not finite or a level that went on rising, most
likely comes of it, and would come again.
"""

from __future__ import annotations

from trainwarden.rules.core.counted import counted
from trainwarden.rules.core.facts import Evidence, Facts, Finding

#: What is said where this line looked and found nothing.
CLEAR = "No change was planned near the onset."

#: Weights of a change in whose burn-in the onset lies, and of one that is just over.
WITHIN, BEHIND = 0.8, 0.55


def find(facts: Facts) -> Evidence:
    """Return a finding for each planned change that is near. One that leaves the loss alone explains nothing by itself."""
    found = []
    for change in facts.changes:
        weight = WITHIN if facts.onset <= change.end else BEHIND
        says = f"A change of {change.name} was planned after step {change.step}, {counted(facts.onset - change.step, 'step')} before."
        cause = "planned_change" if change.everything else ""
        found.append(
            Finding(kind="planned_change", step=change.step, cause=cause, weight=weight if cause else 0.0, says=says)
        )
    return found
