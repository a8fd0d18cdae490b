"""Which checkpoint to go back to (design §4.5).

Complete, not known to be non-finite, older than the onset less its uncertainty, not deleted, never kept in quarantine, never of an
abandoned line, however high its step, and never of a probe that has not passed. For optimizer and numeric causes also older by one memory of the second moment, 1/(1 - beta2) of the *actual* beta2:
what came in before the onset was noticed is still in it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from trainwarden.plan import Target

from .counted import counted
from .state import Checkpoint, Executed

#: Causes whose damage the optimizer's memory carries.
CARRIED = ("numeric", "optimizer_state")
#: Causes that begin at the onset and not before it.
SUDDEN = ("data", "hardware")
#: Checkpoints named beside the target, in case it cannot be read.
FALLBACKS = 2
#: Newer checkpoints that were passed over, of which it is said why.
PASSED_OVER = 2


@dataclass(frozen=True, slots=True)
class Choice:
    """A target with its fallbacks. ``too_young``: it lies within one memory of the onset, so a reset is needed.

    ``wanted`` is the step before which the newest checkpoint was taken; ``memory`` are the steps of one memory of the second moment, None
    where the cause leaves nothing in it or beta2 is not known.
    """

    target: Target
    fallbacks: list[Target]
    too_young: bool
    says: str
    wanted: int = 0
    memory: int | None = None


def abandoned(checkpoint: Checkpoint, executed: Sequence[Executed]) -> bool:
    """Say whether the checkpoint belongs to a line that a later attempt was rolled back behind."""
    return checkpoint.abandoned or any(
        plan.for_attempt > checkpoint.attempt and checkpoint.step > plan.target_step for plan in executed
    )


def usable(checkpoints: Sequence[Checkpoint], executed: Sequence[Executed], before: int) -> list[Checkpoint]:
    """Return the checkpoints of steps below ``before`` that may be loaded, newest first."""
    found = [
        checkpoint for checkpoint in checkpoints if checkpoint.step < before and why_not(checkpoint, executed) is None
    ]
    return sorted(found, key=lambda checkpoint: (-checkpoint.step, -checkpoint.attempt, checkpoint.path))


def why_not(checkpoint: Checkpoint, executed: Sequence[Executed]) -> str | None:
    """Return in words why a checkpoint may not be loaded, None where it may."""
    if checkpoint.quarantined:
        return "is kept for examination alone"
    if checkpoint.complete is not True:
        return "is incomplete" if checkpoint.complete is False else "was never reported complete"
    if checkpoint.emergency:
        return "was saved in an emergency"
    if checkpoint.finite is False:
        return "holds values that are not finite"
    if checkpoint.deleted:
        return "was deleted"
    if abandoned(checkpoint, executed):
        return "is of an abandoned line"
    line = max((one for one in executed if one.for_attempt <= checkpoint.attempt), key=_order, default=None)
    return "is of a probe that has not passed" if line is not None and line.probe else None


def _order(plan: Executed) -> int:
    return plan.for_attempt


def passed_over(checkpoints: Sequence[Checkpoint], executed: Sequence[Executed], above: int, before: int) -> str:
    """Return a sentence about the checkpoints of steps between ``above`` and ``before`` that may not be loaded, or "" (case E03)."""
    found = [
        (one.step, why)
        for one in checkpoints
        if above < one.step < before and (why := why_not(one, executed)) is not None
    ]
    newest = sorted(dict.fromkeys(found), reverse=True)[:PASSED_OVER]
    return "".join(f"; that of step {step} {why}" for step, why in newest)


def choose(
    checkpoints: Sequence[Checkpoint],
    executed: Sequence[Executed],
    onset: int,
    uncertainty: int,
    cause: str,
    beta2: float | None,
    further_than: int | None = None,
    drift: int | None = None,
) -> Choice | None:
    """Return the target for an incident, or None where no checkpoint may be loaded.

    A checkpoint of step n is the state after update n, and the onset's loss was computed before the onset's update: step
    ``onset - 1`` is still clean. ``further_than`` asks for one older than a target that did not help, ``drift`` is the first sign
    of what led to the onset: where there is a checkpoint from before it, a newer one is bad already (case A03).
    """
    before = onset - uncertainty
    if further_than is not None:
        before = min(before, further_than)
    found = usable(checkpoints, executed, before)
    if not found:
        return None if further_than is not None else _within_doubt(checkpoints, executed, onset, uncertainty)
    best, too_young, memory, wanted = 0, False, None, before
    says = f"the newest complete checkpoint before step {before} (onset {onset}, uncertain by {uncertainty})"
    older = usable(checkpoints, executed, min(before, drift)) if drift is not None and cause not in SUDDEN else []
    if older:
        found, wanted = older, min(before, drift or before)
        says = f"the newest complete checkpoint before step {drift}, from which on the loss scale fell until the onset at {onset}"
    if cause in CARRIED and beta2 is not None and beta2 < 1:
        memory = round(1 / (1 - beta2))
        old = [place for place, checkpoint in enumerate(found) if checkpoint.step < onset - uncertainty - memory]
        if old:
            best, wanted = old[0], min(wanted, onset - uncertainty - memory)
            says += f", and older than it by one memory of the second moment ({memory} steps at beta2 {beta2:g})"
        else:
            too_young = True
            says += f"; none is older by one memory of the second moment ({memory} steps), so the optimizer is reset"
    elif cause in CARRIED:
        says += "; beta2 is not known, so nothing says for how long the second moment remembers"
    says += passed_over(checkpoints, executed, found[best].step, before)
    chosen = [Target(attempt=one.attempt, step=one.step, path=one.path) for one in found[best : best + 1 + FALLBACKS]]
    return Choice(chosen[0], chosen[1:], too_young, says, wanted, memory)


def _within_doubt(
    checkpoints: Sequence[Checkpoint], executed: Sequence[Executed], onset: int, uncertainty: int
) -> Choice | None:
    """Return the newest checkpoint of a step from which on the onset may lie, if its values are known to be finite (case A43).

    There is no older one; a person must approve it, and the optimizer is reset.
    """
    found = [one for one in usable(checkpoints, executed, onset) if one.finite is True]
    if not found:
        return None
    gap = counted(onset - found[0].step, "step")
    says = (
        f"the only finite checkpoint, taken {gap} before the onset at {onset}, which is uncertain by {uncertainty}: what broke the run may "
        "be in it already, so the optimizer is reset"
    )
    chosen = [Target(attempt=one.attempt, step=one.step, path=one.path) for one in found[: 1 + FALLBACKS]]
    return Choice(chosen[0], chosen[1:], True, says, onset - uncertainty)
