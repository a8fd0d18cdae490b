"""The optimizer's state is not the parent's: its counter went back over the resume, or the update grew under the same rate.

Without its counter Adam's bias correction begins anew, and the first updates are up to 2.2 times what they were (case A05).
"""

from __future__ import annotations

import numpy as np

from trainwarden.rules.core.facts import Evidence, Facts, Finding, NotPossible

#: What is said where this line looked and found nothing.
CLEAR = "The onset is far behind the last resume, or behind it the optimizer's counter and its update go on as before."

#: Growth of the update that no usual step makes, and the change of the rate that leaves it unexplained.
GROWN, SAME_RATE = 1.3, 0.05
#: Measurements before and behind the resume that are compared.
BEFORE, BEHIND = 50, 5


def find(facts: Facts) -> Evidence:
    """Return a finding for a counter that was not restored, and one for an update that grew."""
    if facts.resumed_from is None:
        return NotPossible("this start did not resume from a checkpoint")
    if facts.far_from_resume:
        return []
    if facts.at_resume("optimizer_step") is None and facts.at_resume("update_ratio") is None:
        return NotPossible(
            "neither counter nor update of the attempt before can be compared: changed on purpose, or not recorded"
        )
    found: list[Finding] = []
    counter = facts.at_resume("optimizer_step")
    steps, now = facts.after_resume("optimizer_step")
    if counter is not None and len(now) and now[0] < counter:
        says = (
            f"The optimizer's own step counter is {now[0]:.0f} at step {int(steps[0])} and was {counter:.0f} before the resume: "
            "its state was not restored, and its bias correction began anew."
        )
        found.append(Finding(kind="resume_state", step=int(steps[0]), cause="optimizer_state", weight=0.9, says=says))
    rate = facts.at_resume("lr")
    _, rates = facts.after_resume("lr")
    if facts.inherited is None or facts.at_resume("update_ratio") is None or rate is None or not len(rates):
        return found
    before = facts.inherited.column("update_ratio")
    before = before[np.isfinite(before)][-BEFORE:]
    steps, behind = facts.after_resume("update_ratio", BEHIND)
    if len(before) < BEHIND or not len(behind) or abs(rates[0] - rate) > SAME_RATE * abs(rate):
        return found
    usual, top = float(np.median(before)), float(np.max(behind))
    if usual > 0 and top > max(GROWN * usual, float(np.max(before))):
        says = f"After the resume the update is {top / usual:.2g} times what it was, under the same learning rate."
        found.append(Finding(kind="resume_state", step=int(steps[0]), cause="optimizer_state", weight=0.6, says=says))
    return found
