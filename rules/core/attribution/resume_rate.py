"""The learning rate after the resume is not where the parent's was going: the schedule was not restored (case A06)."""

from __future__ import annotations

import numpy as np

from trainwarden.rules.core.facts import Evidence, Facts, Finding, NotPossible

#: What is said where this line looked and found nothing.
CLEAR = "The onset is far behind the last resume, or behind it the learning rate goes on where it was going."

#: The rate is off below and above these shares of what was foretold, as the case has it.
LOW, HIGH = 0.5, 1.05
#: Newest rates of the parent that tell where it was going.
LINE = 20


def find(facts: Facts) -> Evidence:
    """Return a finding where the first rate since the resume is off."""
    if facts.resumed_from is None:
        return NotPossible("this start did not resume from a checkpoint")
    if facts.far_from_resume:
        return []
    before = facts.at_resume("lr")
    steps, rates = facts.after_resume("lr", 1)
    if before is None or not len(rates) or facts.inherited is None or before <= 0:
        return NotPossible(
            "no learning rate of the attempt before can be compared: changed on purpose, or not recorded"
        )
    foretold = before
    known = np.flatnonzero(np.isfinite(facts.inherited.column("lr")))[-LINE:]
    if len(known) > 2:
        past = facts.inherited.steps[known].astype(np.float64)
        line = facts.inherited.column("lr")[known] * facts.planned.lr_factor
        across = past - past.mean()
        slope = float(np.dot(across, line - line.mean()) / np.dot(across, across))
        foretold += slope * (float(steps[0]) - float(past[-1]))
    rate = float(rates[0])
    if LOW - 1 <= (rate - foretold) / before <= HIGH - 1:
        return []
    says = (
        f"The learning rate is {rate:.3g} at step {int(steps[0])}; by the attempt before it should be {foretold:.3g}: "
        "its schedule was not restored."
    )
    return [Finding(kind="resume_rate", step=int(steps[0]), cause="learning_rate", weight=0.9, says=says)]
