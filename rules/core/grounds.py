"""The grounds of the policy's lines: each returns the sentence why it holds, or None. See :data:`.policy.POLICY`."""

from __future__ import annotations

from dataclasses import dataclass

from .attribution import Cause
from .facts import Facts
from .persistence import AFTER, destroyed, dirt, never_learned, useless
from .settings import Settings
from .verdict import RECURRING, still_high

#: Causes between which a replay of the suspect samples tells: they spike again, or they do not (case A38).
REPLAY_TELLS = frozenset({"data", "numeric", "optimizer_state", "hardware"})
#: Findings after which going back alone repeats it and a probe tells why: without evaluation, with the same samples, on another host.
PROBED = (AFTER, "same_place", "repeated_step", "repeated_nearby", "repeated_age")
#: Verdicts that go on and that a lower learning rate may mend (case F01: it stabilised gradient and activation norms).
GOING_ON = (*RECURRING, "drift")


@dataclass(frozen=True, slots=True)
class Past:
    """What limits a decision: what was done to the run so far, and how long this attempt has run. Steps are optimizer steps."""

    rollbacks: int
    rolled_back: bool  #: this attempt began with a plan
    steps_run: int  #: steps of this attempt until now
    ramp_steps: int = 0  #: steps of the plan's ramp
    #: The attempt was a probe, and what it asked about came again: the next plan waits for nothing.
    answered: bool = False
    mismatch: str = ""  #: severity of a rule that found this attempt to have resumed wrongly
    handed_over: bool = False  #: a rollback before this went wrong, and the person who was called has not spoken yet
    targets: bool = True  #: there is a checkpoint from before the onset
    lowered: int = 0  #: requests of this attempt to lower the learning rate
    lowered_at: int | None = None  #: the step at which the newest of them was made
    lowered_until: int | None = None  #: the last step that it changes
    refused: bool = False  #: one of them was refused, or came to nothing
    probed: int = 0  #: probes of the run that were asked for


@dataclass(frozen=True, slots=True)
class Seen:
    """What the policy looks at. ``persists`` is the sentence of what persists, None where nothing does (:func:`.persistence.persists`)."""

    facts: Facts
    cause: Cause
    past: Past
    settings: Settings
    verdict: str
    severity: str
    persists: str | None


def nothing_learned(seen: Seen) -> str | None:
    """The weights are destroyed, no loss was ever a number, and there is nothing to go back to."""
    if seen.past.targets or destroyed(seen.facts, seen.settings) is None:
        return None
    says = never_learned(seen.facts, seen.past.steps_run, seen.settings)
    return None if says is None else f"{says} There is no checkpoint to go back to: stop it and mend what makes it so."


def comes_again(seen: Seen) -> str | None:
    """Something persists that going back would only bring again."""
    why = useless(seen.facts, seen.cause) if seen.persists is not None else None
    return None if why is None else f"{seen.persists} {why}"


def enough(seen: Seen) -> str | None:
    """Something persists after as many rollbacks as the run may have."""
    if seen.persists is None or seen.past.rollbacks < seen.settings.max_rollbacks:
        return None
    return f"{seen.persists} {seen.past.rollbacks} rollbacks were made already: a person must look."


def resumed_wrongly(seen: Seen) -> str | None:
    """Something persists in an attempt that did not go on as its parent left off."""
    if seen.persists is None or not seen.past.mismatch:
        return None
    return f"{seen.persists} It resumed wrongly: after a rollback the next one would as well."


def being_tried(seen: Seen) -> str | None:
    """Something persists that a lowered learning rate has not had the time to mend, and waiting does no more harm."""
    at, until = seen.past.lowered_at, seen.past.lowered_until
    if seen.persists is None or at is None or until is None or seen.past.refused or _graver(seen):
        return None
    shows = min(until, at + seen.settings.persist_steps)
    says = (
        f"{seen.persists} The learning rate is lowered since step {at}: at step {shows} it shows whether that mends it."
    )
    return says if seen.facts.now <= shows else None


def probe_tells(seen: Seen) -> str | None:
    """Something persists of which a probe attempt tells the cause: a replay, a run without evaluation or on another host."""
    settings, past = seen.settings, seen.past
    if not settings.probe or seen.persists is None or past.mismatch or not past.targets:
        return None
    if past.probed >= settings.max_probes or past.rollbacks >= settings.max_rollbacks:
        return None
    again = useless(seen.facts, seen.cause)
    if again is not None and any(one.kind in PROBED for one in seen.cause.findings):
        return f"{again} A probe tells."
    speaks = [name for name, score in seen.cause.scores.items() if score > 0]
    if not unclear(seen) or not seen.facts.samples or (speaks and REPLAY_TELLS.isdisjoint(speaks)):
        return None
    return f"{seen.persists} Whether data or state is the cause is not clear: replaying the suspect samples tells."


def lasts(seen: Seen) -> str | None:
    """Something persists."""
    if not seen.past.handed_over or seen.persists is None:
        return seen.persists
    return f"{seen.persists} The last rollback went wrong and nobody has acknowledged it."


def rate_too_high(seen: Seen) -> str | None:
    """The learning rate is the cause, it goes on for longer than what heals by itself, and the run is not destroyed."""
    settings, cause, past = seen.settings, seen.cause, seen.past
    if not settings.lower_lr or seen.severity == "info" or past.lowered >= settings.max_lower_lr or _graver(seen):
        return None
    if cause.name != "learning_rate" or cause.confidence < settings.confidence or past.mismatch or past.refused:
        return None
    if past.lowered_until is not None and seen.facts.now <= past.lowered_until:
        return None
    if still_high(seen.facts, settings.soft_steps):
        return f"The loss stays above its trend for {settings.soft_steps} steps, and the learning rate is the cause."
    goes_on = seen.verdict in GOING_ON and seen.facts.now - seen.facts.onset >= settings.soft_steps
    return f"It goes on ({seen.verdict.replace('_', ' ')}), and the learning rate is the cause." if goes_on else None


def _graver(seen: Seen) -> bool:
    """Say whether waiting does more harm than a lower rate could mend: destroyed weights, dirty data."""
    return (destroyed(seen.facts, seen.settings) or dirt(seen.facts, seen.cause, seen.settings)) is not None


def unclear(seen: Seen) -> bool:
    """Say whether the cause is too unclear to act upon without a person."""
    return seen.cause.name in ("undetermined", "planned_change") or seen.cause.confidence < seen.settings.confidence
