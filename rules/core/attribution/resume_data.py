"""The data after the resume is not what comes next: the position went back, or the loss has another level at once.

A loss that is better right behind a resume has seen its data before (case A09); a position that is not the checkpoint's reads some
samples twice and others never, and the loss shows nothing of it (case A21).
"""

from __future__ import annotations

import math

import numpy as np

from trainwarden.rules.core.facts import Evidence, Facts, Finding, NotPossible
from trainwarden.rules.core.resumed import departed

#: What is said where this line looked and found nothing.
CLEAR = "The onset is far behind the last resume, or behind it position and loss go on as before."

#: Steps' worth of samples that a position may be ahead of the pace, as a factor and a number.
AHEAD = (1.5, 2.0)


def find(facts: Facts) -> Evidence:
    """Return a finding about the position and one about the level of the loss."""
    if facts.resumed_from is None:
        return NotPossible("this start did not resume from a checkpoint")
    if facts.far_from_resume:
        return []
    if facts.at_resume("loss") is None and facts.at_resume("sample_position") is None:
        return NotPossible(
            "neither position nor loss of the attempt before can be compared: changed on purpose, or not recorded"
        )
    return [*_position(facts), *_level(facts)]


def _position(facts: Facts) -> list[Finding]:
    before = facts.at_resume("sample_position")
    steps, now = facts.after_resume("sample_position", 1)
    if before is None or not len(now) or facts.inherited is None or facts.resumed_from is None:
        return []
    epoch = facts.at_resume("epoch")
    _, epochs = facts.after_resume("epoch", 1)
    if epoch is not None and len(epochs) and _number(epochs[0]) > _number(epoch):
        return []
    said = f"The samples of step {int(steps[0])} end at position {now[0]:.0f} of the epoch, and {before:.0f} were read before the resume: "
    if now[0] < before:
        why = "the loader's position was not restored."
    else:
        known = np.flatnonzero(np.isfinite(facts.inherited.column("sample_position")))[-20:]
        past = facts.inherited.column("sample_position")[known]
        taken = np.diff(past) / np.maximum(np.diff(facts.inherited.steps[known]), 1)
        pace = float(np.median(taken[taken > 0])) if (taken > 0).any() else math.inf
        if now[0] - before <= pace * (AHEAD[0] * (int(steps[0]) - facts.resumed_from) + AHEAD[1]):
            return []
        why = "the loader passed over samples that are never read."
    return [Finding(kind="resume_data", step=int(steps[0]), cause="data", weight=0.9, says=said + why)]


def _number(epoch: float) -> float:
    """Return the number of an epoch that is told in whole numbers or in shares; a border belongs to the one that ends."""
    return float(np.ceil(epoch - 1e-6))


def _level(facts: Facts) -> list[Finding]:
    if facts.inherited is None or facts.resumed_from is None or facts.at_resume("loss") is None:
        return []
    found = departed(facts.inherited, facts.trace, facts.resumed_from)
    if found is None or not found.off:
        return []
    excess = found.shift.excess
    says = f"Since the resume the loss lies {abs(excess):.3g} {'below' if excess < 0 else 'above'} where the attempt before led"
    says += ": such data was seen before." if excess < 0 else "."
    weight = 0.85 if excess < 0 else 0.3
    step = facts.trace.steps[facts.trace.row(facts.resumed_from + 1)]
    return [Finding(kind="resume_data", step=int(step), cause="data", weight=weight, says=says)]
