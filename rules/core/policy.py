"""What should be done: from shape, persistence, cause and what was done before. Whether it may be done now is the gates' business.

Only persistence justifies a rollback. Three things persist: weights that are no longer numbers, a loss that stays high, and a
shard that is dirty step after step while loss or gradient are abnormal; the last may be acted upon sooner, because each
further step does more damage and the evidence does not get better.

A start that goes on otherwise than its parent left off is never rolled back: the next one would resume in the same way (case A05).
A person mends what restores it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np

from .attribution import Cause
from .facts import Facts
from .settings import Settings
from .verdict import still_high

Wanted = Literal["none", "lower_lr", "probe", "rollback", "stop", "escalate"]

#: Actions that leave the attempt running and make no incident critical (design §2).
SOFT: tuple[Wanted, ...] = ("lower_lr", "probe")


@dataclass(frozen=True, slots=True)
class Decision:
    """What should be done and why; ``needs_approval`` where the cause is too unclear to act alone.

    What a planned change broke is unclear too: behind a rollback the change comes again.
    ``held_by`` names what makes it wait for more steps: ``warm_up`` or ``cool_down``.
    """

    action: Wanted
    why: str
    needs_approval: bool = False
    held_by: str | None = None


@dataclass(frozen=True, slots=True)
class Past:
    """What limits a decision: rollbacks of the run so far, and how long this attempt has run."""

    rollbacks: int
    rolled_back: bool  #: this attempt began with a plan
    steps_run: int  #: steps of this attempt until now
    ramp_steps: int = 0  #: steps of the plan's ramp
    mismatch: str = ""  #: severity of a rule that found this attempt to have resumed wrongly
    handed_over: bool = False  #: a rollback before this went wrong, and the person who was called has not spoken yet
    lowered: int = 0  #: requests of this attempt to lower the learning rate
    lowered_until: int | None = None  #: the last step that the newest of them changes
    probed: int = 0  #: probes of the run that were asked for


NOTHING = Decision("none", "")
#: Findings that an earlier attempt broke alike, and causes of which a plan takes away what made it so.
REPEATS = ("repeated_step", "repeated_nearby", "repeated_age")
MENDED = ("data", "hardware")
#: The finding that replicas went apart.
DISAGREE = "ranks_disagree"
#: The finding that it began behind an evaluation or a checkpoint; a strong one says that it did so again and again (case A39).
AFTER = "after_event"


def decide(facts: Facts, cause: Cause, past: Past, settings: Settings) -> Decision:
    """Return what should be done about an open incident now."""
    reason = _reason(facts, cause, settings)
    if reason is None and past.mismatch == "critical" and "mismatch" in facts.offered:
        reason = "It did not go on as the attempt before left off."
    if (
        reason is None
        and cause.name == "distributed"
        and facts.records >= settings.dirty_steps
        and _useless(facts, cause)
    ):
        reason = "The ranks no longer hold one state."
    if reason is None:
        return NOTHING
    if past.steps_run <= settings.warmup_steps + past.ramp_steps:
        return Decision("none", f"{reason} Nothing is done within the attempt's warm-up.", held_by="warm_up")
    if past.rolled_back and past.steps_run <= settings.cooldown_steps:
        return Decision("none", f"{reason} The last rollback is too recent.", held_by="cool_down")
    useless = _useless(facts, cause)
    if useless is not None:
        return Decision("escalate", f"{reason} {useless}")
    if past.rollbacks >= settings.max_rollbacks:
        return Decision("escalate", f"{reason} {past.rollbacks} rollbacks were made already: a person must look.")
    if past.mismatch:
        return Decision("escalate", f"{reason} It resumed wrongly: after a rollback the next one would as well.")
    unclear = cause.name in ("undetermined", "planned_change") or cause.confidence < settings.confidence
    if past.handed_over:
        reason = f"{reason} The last rollback went wrong and nobody has acknowledged it."
    return Decision("rollback", reason, needs_approval=unclear or past.handed_over)


def _useless(facts: Facts, cause: Cause) -> str | None:
    """Say why going back would only bring it again: the attempt before broke alike, or the ranks no longer hold one state."""
    for finding in cause.findings:
        if finding.kind in REPEATS and cause.name not in MENDED:
            return f"{finding.says} Going back once more would repeat it. {cause.cheapest_test}"
        if finding.kind == DISAGREE and cause.name == "distributed":
            return f"{finding.says} On the same hosts and libraries it would come again. {cause.cheapest_test}"
        if finding.kind == "same_place" and cause.name == "hardware" and not facts.repeated_hosts:
            return f"{finding.says} There is no other host to go to. {cause.cheapest_test}"
        if finding.kind == AFTER and finding.cause == cause.name and finding.weight >= 0.5:
            return f"{finding.says} Going back runs into the next one. {cause.cheapest_test}"
    return None


def _reason(facts: Facts, cause: Cause, settings: Settings) -> str | None:
    stride = facts.trace.stride()
    need = max(2, settings.nonfinite_steps // stride)
    if facts.records >= need and facts.nonfinite[-need:].all():
        return f"The loss is not finite for {need} records in a row: the weights are no longer numbers."
    if facts.whose.bad >= need and facts.whose.bad_at == facts.now:
        return (
            f"The loss of some ranks alone is not finite for {facts.whose.bad} records: their weights are no numbers."
        )
    if cause.name == "data" and dirty_now(facts, settings.dirty_steps):
        return (
            f"{int(np.count_nonzero(facts.dirty))} batches since step {facts.onset} are dirty and it does not heal: "
            "each further step does more damage."
        )
    if still_high(facts, settings.persist_steps):
        return f"The loss stays above its trend for {settings.persist_steps} steps and does not come back."
    return None


def dirty_now(facts: Facts, steps: int) -> bool:
    """Say whether data stayed dirty for ``steps`` up to now, with loss or gradient abnormal and no sign of healing."""
    records = max(3, steps // facts.trace.stride())
    if facts.records < records:
        return False
    dirty = facts.dirty[-records:]
    odd = (facts.loss_high | facts.grad_high)[-records:]
    recent = records // 2
    return bool(
        np.count_nonzero(dirty) >= 0.8 * records
        and np.count_nonzero(odd) >= 0.6 * records
        and np.count_nonzero(odd[-recent:]) >= 0.6 * recent
    )
