"""Which moved first, gradient or loss, and by how much (design §4.2 and §4.3).

A lead of two steps or more points to the optimisation or its state; none or one to the data or the forward numerics; a loss
that rises without any change of the gradient to a hard but harmless batch, unless it stays high: no batch lasts. "A before B"
counts only where the gap exceeds the cadence of both. Sources: cases A01 (four steps), A04 (one step), A10 (update ratio before both).

The loss has risen where it comes to a good part of what it soon reaches: in case A01 one odd record four steps before is no rise. A
gradient that jumps tenfold within one record of a usual loss, and a loss that jumps with the very next and stays up, is what the update of
one batch does (case A04): that batch is the first to look at, and no more, for a fault of a device may do the same (case A38).
"""

from __future__ import annotations

import numpy as np

from trainwarden.rules.core.baseline import above
from trainwarden.rules.core.counted import counted
from trainwarden.rules.core.facts import GRAD_FACTOR, GRAD_SDS, Evidence, Facts, Finding, NotPossible

#: What is said where this line looked and found nothing.
CLEAR = "Neither gradient nor update moved before the loss, nor with it."

#: Records of a high loss that no hard batch explains: what one step did to a run is over after thirty (case A01).
STAYED = 30
#: Records from the first high loss on of which the highest counts, and the part of it from which the loss has risen.
SOON, PART = 6, 0.25
#: Factor by which one record's gradient stands out, and what it weighs for its batch that the next loss jumped and stayed up.
JUMP, HARMED = 8.0, 0.57


def find(facts: Facts) -> Evidence:
    """Return at most one finding about the order of gradient and loss."""
    if not facts.loss_high.any():
        return NotPossible("the loss did not leave its trend: nothing can have led it")
    rose = _rose(facts)
    loss_step = int(facts.steps[rose])
    first: tuple[int, str] | None = None
    seen = False
    for name in ("grad_norm", "update_ratio"):
        if name not in facts.usual:
            continue
        seen = True
        high = facts.trace.measured(name)[facts.rows] & above(
            facts.trace.column(name)[facts.rows], facts.usual[name], GRAD_SDS, GRAD_FACTOR
        )
        if high.any():
            step = int(facts.steps[int(np.argmax(high))])
            if first is None or step < first[0]:
                first = (step, name)
    if not seen:
        return NotPossible("neither gradient norm nor update ratio is recorded")
    if first is None and not _one_batch(facts):
        return []
    if first is None:
        return [
            Finding(
                kind="gradient_lead",
                step=loss_step,
                cause="data",
                weight=0.2,
                says="The loss rose without any change of the gradient norm: a hard batch, not a harmful one.",
            )
        ]
    step, name = first
    lead = loss_step - step
    resolution = max(facts.trace.cadence("loss"), facts.trace.cadence(name), facts.trace.stride())
    if lead > resolution:
        says = f"{name} was abnormal {counted(lead, 'step')} before the loss, which points to the optimisation or its state."
        return [
            Finding(kind="gradient_lead", step=step, cause="optimizer_state", weight=0.25, says=says),
            Finding(kind="gradient_lead", step=step, cause="learning_rate", weight=0.25, says=says),
        ]
    if lead >= -resolution and resolution <= 1:
        says = f"{name} and loss became abnormal within one step, which points to the batch or the forward pass."
        if lead == 1 and _harmed(facts, rose - 1):
            says = (
                f"grad_norm jumped within one step, at a usual loss, and the loss jumped at the next and stayed up: the update of step "
                f"{step} did the harm, which points to its batch."
            )
            test = (
                f"Look at the samples of step {step} (trainwarden data show --step {step}), and replay it from the checkpoint before: if the "
                "gradient jumps again it is the batch, else the machine."
            )
            return [
                Finding(kind="gradient_lead", step=step, cause="data", weight=HARMED, says=says, test=test),
                Finding(kind="gradient_lead", step=step, cause="hardware", weight=0.1, says=says),
                Finding(kind="gradient_lead", step=step, cause="numeric", weight=0.1, says=says),
            ]
        return [
            Finding(kind="gradient_lead", step=step, cause="data", weight=0.2, says=says),
            Finding(kind="gradient_lead", step=step, cause="numeric", weight=0.1, says=says),
        ]
    return []


def _rose(facts: Facts) -> int:
    """Return the row at which the loss had risen to a good part of what it reaches within a few records of the first high one."""
    first = int(np.argmax(facts.loss_high))
    soon = facts.excess[first : first + SOON]
    if not np.isfinite(soon[0]) or not np.isfinite(soon).any():
        return first
    return first + int(np.argmax(soon >= PART * float(np.nanmax(soon))))


def _harmed(facts: Facts, row: int) -> bool:
    """Say whether the gradient of one record, and none before it, stands far out, and the loss behind it jumped and stayed up."""
    usual = facts.usual.get("grad_norm")
    if usual is None or usual.median <= 0 or row < 0 or facts.nonfinite.any():
        return False
    end = len(facts.trace) - len(facts.steps) + row
    norms = facts.trace.column("grad_norm")[max(0, end - 1) : end + 1]
    behind = facts.loss_high[row + 1 : row + 1 + STAYED]
    return (
        len(norms) == 2
        and bool(norms[1] >= JUMP * usual.median)
        and not bool(above(norms[:1], usual, GRAD_SDS, GRAD_FACTOR)[0])
        and len(behind) >= STAYED
        and bool(behind.all())
    )


def _one_batch(facts: Facts) -> bool:
    """Say whether a batch may explain the loss: it rose at the onset, to a number, and not for longer than batches are hard.

    Be it by less than one record's noise shows: then a single record stands out somewhere behind the onset, and it is not what began.
    """
    high = int(np.argmax(facts.loss_high))
    if high > STAYED or facts.nonfinite[high] or int(np.count_nonzero(facts.loss_high)) > STAYED:
        return False
    behind = facts.excess[: 6 * STAYED]
    behind = behind[np.isfinite(behind)]
    return len(behind) <= STAYED or float(np.median(behind)) < 1.0
