"""The plan: what the next attempt of a run must do differently, and how it says what it did.

The daemon makes a plan, the receiver verifies and writes it, the exporter's resume side carries it out and reports
:class:`Applied` in its start event, and the daemon checks the records against :class:`Checks`. The plan directory is the
single way into a run.
"""

from __future__ import annotations

import re
from datetime import datetime
from typing import Any, Literal, TypeAlias

import msgspec

from .record import Ranges

SkipMode = Literal["substitute", "shift"]
Action = Literal["rollback", "stop", "lower_lr", "probe", "quarantine"]

#: What a probe attempt tries: see :class:`Probe`.
ProbeKind = Literal["replay", "without_evaluation", "other_host"]

#: Steps of a close look at most: each costs several times a usual one.
MOST_LOOKED = 1000
#: Steps for which the learning rate may be lowered at most, and over which it may come back: what lasts longer is another schedule.
MOST_LOWERED = 1_000_000
#: Steps within which a probe looks for its answer at most.
MOST_PROBED = 100_000
#: Actions that end an attempt. At most one of them takes effect per (run_uid, attempt).
ENDING_ACTIONS: tuple[Action, ...] = ("rollback", "stop", "probe")
#: Those after which the next attempt begins from the plan's target.
RESTARTING_ACTIONS: tuple[Action, ...] = ("rollback", "probe")


class PlanError(ValueError):
    """A plan, ledger or report that cannot be read. The message names the file and the field."""


class Target(msgspec.Struct, frozen=True, kw_only=True):
    """A checkpoint: the state after update ``step``, written by ``attempt`` at ``path``. Resume starts at step + 1."""

    attempt: int
    step: int
    path: str


class Exclusion(msgspec.Struct, frozen=True, kw_only=True):
    """Data named by identity, whatever the order: rows ``[first, end)`` of ``shard`` in ``dataset``; holds in every epoch."""

    dataset: str
    shard: str
    first: int
    end: int


class CloseLook(msgspec.Struct, frozen=True, kw_only=True):
    """A look as close as torch allows, at the steps from ``first_step`` on, ``steps`` of them (1 to :data:`MOST_LOOKED`).

    ``check_nan`` is that of :func:`torch.autograd.detect_anomaly`: a NaN in a backward pass raises, and so ends a run that might have
    gone on. Without it nothing is raised.
    """

    first_step: int
    steps: int
    check_nan: bool = False

    @property
    def end(self) -> int:
        """The first step behind it."""
        return self.first_step + self.steps


class Probe(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A question that an attempt is to answer: does what began at ``first_step`` come again within ``steps`` steps (1 to
    :data:`MOST_PROBED`)?

    The attempt makes the steps behind the plan's target again, with the same samples. ``replay`` changes nothing else but what the
    plan resets, ``without_evaluation`` leaves every evaluation out, ``other_host`` runs elsewhere than on the plan's
    ``exclude_hosts``. ``samples`` are the suspect positions of epoch ``epoch``. Cases A38, A39 and A24.
    """

    kind: ProbeKind
    first_step: int
    steps: int
    samples: Ranges = msgspec.field(default_factory=list)
    epoch: int = 0

    @property
    def end(self) -> int:
        """The first step behind those in which the answer is looked for."""
        return self.first_step + self.steps


class Lowering(msgspec.Struct, frozen=True, kw_only=True):
    """The multiplier of the scheduled learning rate, by step: ``factor`` for ``steps`` from ``first_step`` on, then a linear ramp back.

    The ramp has ``return_steps`` steps, evenly between ``factor`` and 1; behind it the rate is the scheduled one.
    """

    factor: float
    first_step: int
    steps: int
    return_steps: int = 0

    @property
    def returns(self) -> int:
        """The first step of the ramp back."""
        return self.first_step + self.steps

    @property
    def end(self) -> int:
        """The first step behind it, at the scheduled rate."""
        return self.returns + self.return_steps

    def at(self, step: int) -> float:
        """Return the multiplier at a global step."""
        if not self.first_step <= step < self.end:
            return 1.0
        risen = max(0, step - self.returns + 1) / (self.return_steps + 1)
        return self.factor + (1.0 - self.factor) * risen


class Checks(msgspec.Struct, frozen=True, kw_only=True):
    """What the first records of the new attempt must show if the plan was applied.

    ``start_step``: number of its first step. ``lr``: effective learning rate there. ``optimizer_step``: the
    optimizer's own counter after it. ``skipped``: sample positions that its records must not contain.
    None means that there is nothing to compare.
    """

    start_step: int
    lr: float | None = None
    optimizer_step: int | None = None
    skipped: Ranges = msgspec.field(default_factory=list)


class Quarantine(msgspec.Struct, frozen=True, kw_only=True):
    """What the trainer is asked to keep for whoever looks into ``incident``: its damaged state, never to be resumed from.

    ``suspect_step`` is the incident's onset, ``last_good`` the checkpoint that a rollback would go back to, from which the suspect
    step can be made again. After ``expires_at`` (ISO 8601 with a time zone) nothing is saved any more.
    """

    incident: str
    expires_at: str
    suspect_step: int
    last_good: Target | None = None


class Plan(msgspec.Struct, frozen=True, kw_only=True):
    """The complete plan for attempt ``for_attempt`` = the broken attempt + 1.

    ``skip_samples`` are positions in the unskipped global order of epoch ``skip_epoch``. ``substitute`` fills skipped
    positions from a reserve, so that every other step keeps its batch; ``shift`` moves what follows forward.
    ``lr_factor`` multiplies the scheduled rate; ``rewarmup_steps`` ramps it up from zero after an optimizer reset.
    ``anomaly``: steps that are looked at as closely as torch allows, see :class:`CloseLook`; plans of older versions have none.
    ``probe``: what the attempt is to find out, see :class:`Probe`; it belongs to the action ``probe``, which restarts as a rollback does.
    ``reasons`` gives one sentence per field that is not at its default. The soft action ``lower_lr`` is of the attempt that runs,
    which ``for_attempt`` names, and has no target: the rate is ``lr_factor`` times the scheduled one for ``lr_steps`` steps from
    ``at_step`` on, then it comes back over ``lr_return_steps`` (:attr:`lowering`). ``quarantine`` asks for a copy of the state
    and changes nothing.
    """

    plan_id: str
    run_uid: str
    for_attempt: int
    action: Action = "rollback"
    target: Target | None = None
    fallback_targets: list[Target] = msgspec.field(default_factory=list)
    reset_optimizer: bool = False
    lr_factor: float = 1.0
    rewarmup_steps: int = 0
    skip_samples: Ranges = msgspec.field(default_factory=list)
    skip_epoch: int = 0
    exclude: list[Exclusion] = msgspec.field(default_factory=list)
    skip_mode: SkipMode = "substitute"
    exclude_hosts: list[str] = msgspec.field(default_factory=list)
    reasons: dict[str, str] = msgspec.field(default_factory=dict)
    checks: Checks | None = None
    probe: Probe | None = None
    at_step: int | None = None
    lr_steps: int = 0
    lr_return_steps: int = 0
    anomaly: CloseLook | None = None
    quarantine: Quarantine | None = None

    @property
    def lowering(self) -> Lowering | None:
        """The multiplier of the rate in the running attempt; None of a plan that asks for none, or names no step yet."""
        if self.action != "lower_lr" or self.at_step is None:
            return None
        return Lowering(
            factor=self.lr_factor, first_step=self.at_step, steps=self.lr_steps, return_steps=self.lr_return_steps
        )


class Applied(msgspec.Struct, frozen=True, kw_only=True):
    """What the resume side really did with a plan; sent as ``plan_applied`` in the start event.

    ``not_applied`` maps each field of the plan that could not be carried out to the reason. ``start_step`` is the
    step that the first record will carry.
    """

    plan_id: str
    start_step: int
    target: Target | None = None
    reset_optimizer: bool = False
    lr_factor: float = 1.0
    rewarmup_steps: int = 0
    skip_samples: Ranges = msgspec.field(default_factory=list)
    exclude: list[Exclusion] = msgspec.field(default_factory=list)
    anomaly: CloseLook | None = None
    probe: Probe | None = None
    not_applied: dict[str, str] = msgspec.field(default_factory=dict)


class LedgerEntry(msgspec.Struct, frozen=True, kw_only=True):
    """What one executed plan leaves behind for all later attempts: skips, host exclusions, the abandoned line."""

    plan_id: str
    for_attempt: int
    target_step: int
    skip_samples: Ranges = msgspec.field(default_factory=list)
    skip_epoch: int = 0
    exclude: list[Exclusion] = msgspec.field(default_factory=list)
    skip_mode: SkipMode = "substitute"
    exclude_hosts: list[str] = msgspec.field(default_factory=list)


class Ledger(msgspec.Struct, kw_only=True):
    """``RUN/ledger.json``: the executed plans of a run, oldest first. Written by the receiver alone."""

    run_uid: str
    entries: list[LedgerEntry] = msgspec.field(default_factory=list)
    schema: int = 1

    def abandoned(self, attempt: int, step: int) -> bool:
        """Say whether a checkpoint of ``step`` written by ``attempt`` belongs to an abandoned line.

        It does once a later attempt was rolled back to an older step, however high its own step and whenever it
        was written (a SIGTERM handler writes after the decision).
        """
        return any(entry.for_attempt > attempt and step > entry.target_step for entry in self.entries)


class Exclusions(msgspec.Struct, frozen=True, kw_only=True):
    """A file of data that a run leaves out from its first step on. Any JSON object with ``exclude``, such as a plan, reads as one."""

    exclude: list[Exclusion]
    schema: int = 1


PlanLike: TypeAlias = "Plan | Applied | Ledger | Exclusions"

_encoder = msgspec.json.Encoder()


def encode(value: PlanLike) -> bytes:
    """Encode a plan, a report or a ledger as indented JSON for a file that people read."""
    return msgspec.json.format(_encoder.encode(value), indent=2) + b"\n"


def decode_plan(data: bytes, where: str = "plan") -> Plan:
    """Decode a plan.

    Raises:
        PlanError: it is torn, misses a field, or :func:`check_plan` finds fault with it; ``where`` names the source.
    """
    plan: Plan = _decode(data, Plan, where)
    check_plan(plan, where)
    return plan


#: Positions are int64 everywhere; steps, attempts and epochs pass through floats, which are exact up to here.
_LARGEST_POSITION, _LARGEST_NUMBER = 2**63 - 1, 2**53
#: A plan's id becomes part of a file's name.
_PLAN_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}")
#: An incident's id, which begins with the run's name, becomes part of a folder's.
_INCIDENT = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,191}")


def check_plan(plan: Plan, where: str = "plan") -> None:
    """Refuse a plan that is well-formed and cannot be meant.

    Raises:
        PlanError: its id is no file name, a range is empty or reversed, or a number is out of bounds.
    """
    if not _PLAN_ID.fullmatch(plan.plan_id):
        raise PlanError(f"{where}: plan_id: {plan.plan_id!r} is not made of letters, digits, '.', '_' and '-'")
    ranges = [("skip_samples", first, end) for first, end in plan.skip_samples]
    ranges += [("exclude", item.first, item.end) for item in plan.exclude]
    ranges += [("checks.skipped", first, end) for first, end in plan.checks.skipped] if plan.checks else []
    for name, first, end in ranges:
        if not 0 <= first < end <= _LARGEST_POSITION:
            raise PlanError(f"{where}: {name}: [{first}, {end}) is no half-open range of positions")
    if not 0 < plan.lr_factor <= 1:
        raise PlanError(f"{where}: lr_factor: {plan.lr_factor} is not in (0, 1]")
    if plan.anomaly is not None:
        check_look(plan.anomaly, f"{where}: anomaly.")
    numbers = [
        ("rewarmup_steps", plan.rewarmup_steps),
        ("for_attempt", plan.for_attempt),
        ("skip_epoch", plan.skip_epoch),
    ]
    targets = [("target", plan.target)] if plan.target else []
    targets += [("fallback_targets", target) for target in plan.fallback_targets]
    for name, target in targets:
        numbers += [(f"{name}.attempt", target.attempt), (f"{name}.step", target.step)]
    if plan.quarantine is not None:
        numbers += [("quarantine.suspect_step", plan.quarantine.suspect_step)]
    for name, number in numbers:
        if not 0 <= number < _LARGEST_NUMBER:
            raise PlanError(f"{where}: {name}: {number} is {'negative' if number < 0 else 'out of range'}")
    if plan.action == "quarantine" or plan.quarantine is not None:
        _check_quarantine(plan, where)
    if plan.action == "probe" or plan.probe is not None:
        _check_probe(plan, where)
    if plan.action == "lower_lr" or plan.lr_steps or plan.lr_return_steps:
        _check_lowering(plan, where)


def _check_lowering(plan: Plan, where: str) -> None:
    """Refuse a request to lower the learning rate that does not say from when, by what and for how long, or that asks for more.

    Raises:
        PlanError: so it does.
    """
    if plan.action != "lower_lr":
        name = "lr_steps" if plan.lr_steps else "lr_return_steps"
        raise PlanError(f"{where}: {name}: belongs to a plan whose action is lower_lr, and to no other")
    if not plan.lr_factor < 1:
        raise PlanError(f"{where}: lr_factor: {plan.lr_factor} lowers nothing; it must be below 1")
    if plan.at_step is None:
        raise PlanError(f"{where}: at_step: is missing; name the first step at the lowered learning rate")
    if not 1 <= plan.at_step < _LARGEST_NUMBER - 2 * MOST_LOWERED:
        raise PlanError(f"{where}: at_step: {plan.at_step} is no step; they are counted from 1")
    if not 1 <= plan.lr_steps <= MOST_LOWERED:
        raise PlanError(f"{where}: lr_steps: {plan.lr_steps} is not in 1 to {MOST_LOWERED}; a lowered rate comes back")
    if not 0 <= plan.lr_return_steps <= MOST_LOWERED:
        raise PlanError(f"{where}: lr_return_steps: {plan.lr_return_steps} is not in 0 to {MOST_LOWERED}")
    only_a_restart = {
        "target": plan.target,
        "fallback_targets": plan.fallback_targets,
        "reset_optimizer": plan.reset_optimizer,
        "rewarmup_steps": plan.rewarmup_steps,
        "skip_samples": plan.skip_samples,
        "exclude": plan.exclude,
        "exclude_hosts": plan.exclude_hosts,
        "anomaly": plan.anomaly,
    }
    for name, asked in only_a_restart.items():
        if asked:
            raise PlanError(f"{where}: {name}: cannot be asked of a running attempt together with lower_lr")


def _check_probe(plan: Plan, where: str) -> None:
    """Refuse a probe that asks nothing, or whose attempt could not answer it.

    Raises:
        PlanError: so it is.
    """
    asked = plan.probe
    if asked is None or plan.action != "probe":
        raise PlanError(f"{where}: probe: belongs to a plan whose action is probe, and to no other")
    if plan.target is None:
        raise PlanError(f"{where}: target: a probe names the checkpoint that it begins from")
    if plan.skip_samples or plan.exclude:
        raise PlanError(
            f"{where}: skip_samples: a probe leaves no data out; it asks whether the same samples do it again"
        )
    if not 1 <= asked.steps <= MOST_PROBED:
        raise PlanError(f"{where}: probe.steps: {asked.steps} is not in 1 to {MOST_PROBED}")
    if not plan.target.step < asked.first_step < _LARGEST_NUMBER:
        raise PlanError(
            f"{where}: probe.first_step: {asked.first_step} is not behind the target's step {plan.target.step}"
        )
    if not 0 <= asked.epoch < _LARGEST_NUMBER:
        raise PlanError(f"{where}: probe.epoch: {asked.epoch} is no epoch")
    for first, end in asked.samples:
        if not 0 <= first < end <= _LARGEST_POSITION:
            raise PlanError(f"{where}: probe.samples: [{first}, {end}) is no half-open range of positions")


def _check_quarantine(plan: Plan, where: str) -> None:
    """Refuse a request for a quarantined checkpoint that says too little, or asks for more than that.

    Raises:
        PlanError: so it does.
    """
    asked = plan.quarantine
    if asked is None or plan.action != "quarantine":
        raise PlanError(f"{where}: quarantine: belongs to a plan whose action is quarantine, and to no other")
    if plan.target is not None or plan.fallback_targets:
        raise PlanError(f"{where}: target: a plan that asks for a quarantined checkpoint has none")
    if not _INCIDENT.fullmatch(asked.incident):
        raise PlanError(
            f"{where}: quarantine.incident: {asked.incident!r} is not made of letters, digits, '.', '_' and '-'"
        )
    try:
        aware = datetime.fromisoformat(asked.expires_at).tzinfo is not None
    except ValueError:
        aware = False
    if not aware:
        raise PlanError(f"{where}: quarantine.expires_at: {asked.expires_at!r} is no ISO 8601 time with a time zone")


def check_look(look: CloseLook, where: str = "") -> None:
    """Refuse a close look of no step, of too many, or from a step that there is not; ``where`` stands before the field's name.

    Raises:
        PlanError: so it is.
    """
    if not 1 <= look.steps <= MOST_LOOKED:
        raise PlanError(f"{where}steps: {look.steps} is not in 1 to {MOST_LOOKED}")
    if not 1 <= look.first_step < _LARGEST_NUMBER:
        raise PlanError(f"{where}first_step: {look.first_step} is no step; they are counted from 1")


def decode_ledger(data: bytes, where: str = "ledger") -> Ledger:
    """Decode a ledger.

    Raises:
        PlanError: as :func:`decode_plan`, or the major version is another.
    """
    ledger: Ledger = _decode(data, Ledger, where)
    if ledger.schema != 1:
        raise PlanError(f"{where}: schema {ledger.schema} is not 1, the one this version reads")
    return ledger


def decode_exclusions(data: bytes, where: str = "exclusions") -> list[Exclusion]:
    """Decode a file of exclusions.

    Raises:
        PlanError: it is no JSON object with ``exclude``, of another major version, or a range is empty, reversed or out of bounds.
    """
    found: Exclusions = _decode(data, Exclusions, where)
    if found.schema != 1:
        raise PlanError(f"{where}: schema {found.schema} is not 1, the one this version reads")
    for place, item in enumerate(found.exclude):
        if not 0 <= item.first < item.end <= _LARGEST_POSITION:
            raise PlanError(f"{where}: exclude[{place}]: [{item.first}, {item.end}) is no half-open range of rows")
        if not item.dataset:
            raise PlanError(f"{where}: exclude[{place}].dataset: name the data set")
    return found.exclude


def _decode(data: bytes, kind: Any, where: str) -> Any:
    try:
        return msgspec.json.decode(data, type=kind)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise PlanError(f"{where}: {error}") from None


def merge_ranges(ranges: Ranges) -> Ranges:
    """Return the same positions as sorted, disjoint, non-touching half-open ranges."""
    merged: Ranges = []
    for first, end in sorted(ranges):
        if first >= end:
            continue
        if merged and first <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(merged[-1][1], end))
        else:
            merged.append((first, end))
    return merged
