"""The weights changed by more than the updates can have done: something else wrote to them.

An update of a share r of the weights changes their norm by a share of r at most, so that over n steps their RMS moves by n times the
largest update ratio and no further. What goes beyond it at once is memory that fell over, a wrong copy, or code outside of the optimizer; right
behind an evaluation it is the evaluation's. What goes beyond it step by step is in the program: a decay with its sign lost, a rescaling that
repeats. Sources: cases A38 (a bit that flips) and A39 (an evaluation that leaves state behind).
"""

from __future__ import annotations

import numpy as np

from trainwarden.rules.core.block import Floats, Ints
from trainwarden.rules.core.facts import Evidence, Facts, Finding, NotPossible

#: What is said where this line looked and found nothing.
CLEAR = "The weights changed by no more than the updates explain."
#: Steps around the onset that the two measurements must enclose or touch; before one at which rows of the embedding were found damaged,
#: as many as lie between two looks at them.
NEAR, LOOKS = 3, 100
#: Measured updates that tell how large others may be, and the factor that they may be larger by; that of updates which are all measured.
USUAL, MARGIN, KNOWN = 50, 3.0, 1.5
#: An update of Adam is at most (1 - beta1) / sqrt(1 - beta2) learning rates an element, 3.2 at beta2 0.999, and a fifth of one as a rule.
ADAPTIVE = 20.0
#: Share of the weights' RMS that is no change, whatever the updates are.
NOTHING = 0.01
#: What it weighs, twice as far as the updates explain and less far; and where it goes on step by step.
FAR, SOME, STEADY = 0.75, 0.5, 0.6
#: Steps around the onset over which it may go on, measurements that tell, and the largest part of the whole that one of them may be.
BEFORE, BEHIND, ENOUGH, PART = 30, 60, 5, 0.5


def find(facts: Facts) -> Evidence:
    """Return a finding where the RMS of the weights left what the updates allow between two measurements at the onset."""
    known = np.flatnonzero(facts.trace.measured("weight_rms"))
    if len(known) < 2:
        return NotPossible("the size of the weights is not recorded, or once")
    steps, values = facts.trace.steps[known], facts.trace.column("weight_rms")[known]
    steadily = _steadily(facts, steps, values)
    if steadily:
        return steadily
    near = NEAR * facts.trace.stride()
    back = LOOKS * facts.trace.stride() if facts.damaged else near
    for place in range(1, len(known)):
        if steps[place] < facts.onset - back or steps[place - 1] > facts.onset + near:
            continue
        allowed = _allowed(facts, int(steps[place - 1]), int(steps[place]))
        if allowed is None:
            return NotPossible("the updates are not recorded, so that nobody knows what they explain")
        with np.errstate(divide="ignore", invalid="ignore"):
            changed = float(abs(np.log(values[place] / values[place - 1])))
        if np.isnan(changed) or changed <= allowed:
            continue
        return [_at_once(facts, place, steps, values, changed > 2 * allowed, allowed)]
    return []


def _steadily(facts: Facts, steps: Ints, values: Floats) -> list[Finding]:
    """Return a finding where the weights moved on and on, by more than all updates together explain."""
    stride = facts.trace.stride()
    inside = (steps >= facts.onset - BEFORE * stride) & (steps <= facts.onset + BEHIND * stride) & (values > 0)
    steps, values = steps[inside], values[inside]
    if len(steps) < ENOUGH or not np.isfinite(values).all():
        return []
    first, last = int(steps[0]), int(steps[-1])
    allowed = _allowed(facts, first, last)
    moves = np.diff(np.log(values))
    whole = float(np.sum(moves))
    if allowed is None or abs(whole) <= allowed or float(np.max(np.abs(moves))) > PART * abs(whole):
        return []
    says = (
        f"The RMS of the weights went from {values[0]:.4g} at step {first} to {values[-1]:.4g} at step {last}, bit by bit; the updates "
        f"between explain {100 * allowed:.2g} % at most: the program itself rescales them."
    )
    return [Finding(kind="weights_rewritten", step=first, cause="model", weight=STEADY, says=says)]


def _at_once(facts: Facts, place: int, steps: Ints, values: Floats, far: bool, allowed: float) -> Finding:
    before, after = float(values[place - 1]), float(values[place])
    says = (
        f"The RMS of the weights went from {before:.4g} at step {int(steps[place - 1])} to {after:.4g} at step {int(steps[place])}; the "
        f"updates between explain {100 * allowed:.2g} % at most: something else wrote to them"
    )
    evaluated = [one for one in facts.events.steps.get("evaluation", ()) if steps[place - 1] <= one < steps[place]]
    if evaluated:
        says += f", and an evaluation ran at step {evaluated[-1]}."
        cause = "optimizer_state"
    else:
        says += "."
        cause = "hardware"
    return Finding(
        kind="weights_rewritten", step=int(steps[place]), cause=cause, weight=FAR if far else SOME, says=says
    )


def _allowed(facts: Facts, first: int, last: int) -> float | None:
    """Return by which share the updates of the steps behind ``first`` and up to ``last`` may have changed the weights' RMS.

    None where no update was measured before. A rate or a gradient that grew in a step may have made as much larger an update, under an
    optimizer with a second moment up to ``ADAPTIVE`` times.
    """
    ratios = facts.trace.column("update_ratio")[: facts.trace.row(last + 1)]
    ratios = ratios[np.isfinite(ratios)][-USUAL:]
    if not len(ratios):
        return None
    between = facts.trace.rows(first + 1, last + 1)
    growth = np.ones(between.stop - between.start)
    moments = facts.trace.measured("exp_avg_sq").any()
    for name, most in (("grad_norm", ADAPTIVE if moments else np.inf), ("lr", np.inf)):
        usual = facts.before(name)
        if len(usual) and float(np.median(usual)) > 0:
            here = facts.trace.column(name)[between] / float(np.median(usual))
            growth *= np.minimum(np.maximum(np.nan_to_num(here, nan=1.0, posinf=np.inf), 1.0), most)
    here = facts.trace.column("update_ratio")[between]
    if facts.trace.measured("update_ratio")[between].all() and np.isfinite(here).all():
        return NOTHING + KNOWN * float(np.sum(here)) * facts.trace.stride()
    return NOTHING + MARGIN * float(np.max(ratios)) * float(np.sum(growth)) * facts.trace.stride()
