"""The plan: what the next attempt must do differently, and why. The fix follows the cause (design §4.6).

Data: exclude it and leave the learning rate alone. Numeric: go back and reset the optimizer. Optimizer: reset with a short
warm-up. Learning rate: halve it and warm up again. Hardware: leave the host out. Unclear: only go back, and ask. What the run's loader cannot do is refused
here, before anything is stopped. A rollback that did not help is followed by one that goes further back and leaves more out.

Every field that is not at its default has its reason in words.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import sha256

import msgspec
import numpy as np

from trainwarden.plan import Checks, CloseLook, Exclusion, Plan, SkipMode, Target, merge_ranges
from trainwarden.record import Ranges

from .drift import first_sign
from .facts import Facts
from .inputs import Start
from .lowered import multiplier
from .machines import listed
from .meetings import in_skip
from .settings import Settings
from .spacing import Going, advice, none_at_all
from .state import Alive, Checkpoint, Executed
from .suspects import suspects
from .targets import Choice, choose
from .trace import Trace

#: An end beyond a shard's last row means the rest of it; the extent in positions says nothing about rows held in reserve.
WHOLE_SHARD = 1 << 40
#: What a record tells as the optimizer's counter is one below this; a float is exact up to here.
LARGEST_COUNTER = 2**53
#: Share of its own length by which a skip that did not suffice is widened on either side.
WIDER = 0.5
#: Steps before and behind the onset that the next attempt looks at closely; where it first was wrong, it may be a step or two earlier.
LOOK_BEFORE, LOOK_BEHIND = 2, 10


@dataclass(frozen=True, slots=True)
class Refusal:
    """No plan can be made, and why; ``advice`` is what would have made one possible."""

    why: str
    advice: str = ""


@dataclass(frozen=True, slots=True)
class Planned:
    """A plan; ``low_confidence`` where it needs a person's approval whatever the mode, ``advice`` on what would have made it cheaper."""

    plan: Plan
    low_confidence: bool
    advice: tuple[str, ...] = ()


def plan_rollback(
    facts: Facts,
    cause: str,
    alive: Alive,
    checkpoints: Sequence[Checkpoint],
    executed: Sequence[Executed],
    settings: Settings,
    further_than: int | None = None,
    earlier: Plan | None = None,
    also: tuple[Ranges, int] | None = None,
) -> Planned | Refusal:
    """Make the plan for a rollback of this attempt.

    ``earlier`` is the plan that did not help, kept and widened. ``also`` are further suspect samples and their epoch: those of the incident
    that a probe asked about.
    """
    start = alive.start
    drift = first_sign(facts.trace, alive.inherited, facts.onset)
    chosen = choose(
        checkpoints, executed, facts.onset, facts.uncertainty, cause, facts.beta2 or alive.beta2, further_than, drift
    )
    if chosen is None:
        return Refusal(
            f"there is no complete checkpoint older than step {facts.onset - facts.uncertainty} to go back to",
            none_at_all(checkpoints, facts.onset - facts.uncertainty),
        )
    reasons = {"target": f"Step {chosen.target.step} is {chosen.says}."}
    if chosen.fallbacks:
        reasons["fallback_targets"] = fallback_reason(chosen)
    skip: Ranges = []
    exclude: list[Exclusion] = []
    skip_mode: SkipMode = "substitute"
    epoch = 0
    if cause == "data":
        found = suspects(facts)
        if earlier is None or facts.dirty.any():  # with an earlier plan and clean batches, its skip is all there is
            skip, epoch = found.ranges, found.epoch
        if not skip and (earlier is None or not earlier.skip_samples):
            return Refusal("the data is suspect, but the records do not say which samples the steps consumed")
        mode = _skip_mode(alive.can_skip)
        if mode is None:
            return Refusal("the data is suspect, but this run's loader can neither substitute nor shift samples")
        skip_mode = mode
        reasons["skip_samples"] = f"Dirty data since step {facts.onset}: {found.says}."
        reasons["skip_mode"] = (
            "Other steps keep their batches." if mode == "substitute" else "The loader cannot substitute samples."
        )
        if "exclude" in alive.can_skip and alive.dataset is not None and found.shards:
            exclude = [
                Exclusion(dataset=alive.dataset, shard=span.name, first=0, end=WHOLE_SHARD) for span in found.shards
            ]
            reasons["exclude"] = "The same shards are dirty in every epoch."
    if earlier is not None and earlier.skip_samples and (not skip or earlier.skip_epoch == epoch):
        kept = earlier.skip_samples
        if cause == "data":
            kept = widened(kept, facts)
            says = f"What the last plan skipped did not suffice: it is widened by {WIDER:.0%} on either side."
            reasons["skip_samples"] = " ".join(
                [says, *([reasons["skip_samples"]] if "skip_samples" in reasons else [])]
            )
        skip, epoch = merge_ranges([*kept, *skip]), earlier.skip_epoch
        skip_mode = earlier.skip_mode
        reasons.setdefault("skip_samples", "What the last plan skipped stays skipped.")
    if cause == "data" and skip and also is not None and also[1] == epoch:
        skip = merge_ranges([*skip, *also[0]])
    remembered = []
    if cause == "data" and "exclude" in alive.can_skip and alive.dataset is not None:
        remembered = [one for one in in_skip(alive, skip, epoch) if one not in exclude]
    if remembered:
        exclude = [*exclude, *remembered]
        says = "What of the skip spiked before, in another run or epoch, is left out in every epoch."
        reasons["exclude"] = " ".join([*([reasons["exclude"]] if "exclude" in reasons else []), says])
    if skip and epoch:
        reasons["skip_epoch"] = f"The positions are those of epoch {epoch}'s order."
    reset = chosen.too_young or cause in ("numeric", "optimizer_state") or earlier is not None
    if reset:
        reasons["reset_optimizer"] = _reset_reason(chosen, earlier)
    hosts = list(facts.repeated_hosts) if cause == "hardware" else []
    if hosts:
        reasons["exclude_hosts"] = f"It began on {listed(hosts)} in an earlier attempt, too, with other data."
    elif cause == "hardware" and facts.failed_hosts:
        hosts = list(facts.failed_hosts)
        reasons["exclude_hosts"] = f"A device of {listed(hosts)} failed when it began."
    lr_factor = settings.lr_factor if cause == "learning_rate" else 1.0
    if lr_factor != 1.0:
        reasons["lr_factor"] = f"The learning rate was too high: it goes on with {lr_factor:g} times the schedule."
    ramp = settings.rewarmup_steps if reset or lr_factor != 1.0 else 0
    if ramp:
        reasons["rewarmup_steps"] = (
            f"The rate ramps up over {ramp} steps after {'the reset' if reset else 'the change'}."
        )
    look = close_look(facts, cause, chosen.target.step)
    if look is not None:
        reasons["anomaly"] = (
            f"Steps {look.first_step} to {look.end - 1} are looked at closely: something at step {facts.onset} was not finite, and the "
            "operation that makes it so is yet to be named."
        )
    plan = Plan(
        plan_id="",
        run_uid=start.run_uid,
        for_attempt=start.attempt + 1,
        target=chosen.target,
        fallback_targets=chosen.fallbacks,
        reset_optimizer=reset,
        lr_factor=lr_factor,
        rewarmup_steps=ramp,
        skip_samples=skip,
        skip_epoch=epoch,
        exclude=exclude,
        skip_mode=skip_mode,
        exclude_hosts=hosts,
        reasons=reasons,
        checks=Checks(
            start_step=chosen.target.step + 1,
            lr=expected_lr(alive, chosen.target.step + 1, lr_factor, executed) if not ramp else None,
            optimizer_step=1 if reset else expected_counter(alive, chosen.target.step),
            skipped=skip,
        ),
        anomaly=look,
    )
    going = Going(facts.onset, facts.uncertainty, facts.now, facts.trace.stride(), facts.trace.interval())
    return Planned(named(plan), chosen.too_young or cause == "undetermined", tuple(advice(chosen, checkpoints, going)))


def of_fallback(plan: Plan, target: Target, trace: Trace | None) -> Plan:
    """Return the plan as it is where its attempt began from a fallback: what the records must show then. ``trace`` is the parent's."""
    checks = plan.checks
    if checks is None:
        return msgspec.structs.replace(plan, target=target)
    step = target.step + 1
    told = msgspec.structs.replace(
        checks,
        start_step=step,
        lr=None if plan.rewarmup_steps else rate_at(trace, step, plan.lr_factor),
        optimizer_step=1 if plan.reset_optimizer else one_more(counter_after(trace, target.step)),
    )
    return msgspec.structs.replace(plan, target=target, checks=told)


def fallback_reason(chosen: Choice) -> str:
    """Return the sentence about the checkpoints beside a target."""
    steps = listed([str(target.step) for target in chosen.fallbacks])
    return f"Where the target cannot be read: step {steps}, older ones that may be loaded as well."


def _reset_reason(chosen: Choice, earlier: Plan | None) -> str:
    if earlier is not None:
        return "The last rollback did not help: the state goes too."
    if chosen.too_young:
        return f"The target lies within one memory of the onset ({chosen.memory} steps): what came in may be in its moments already."
    return "What broke the run is still in the optimizer's moments."


def widened(ranges: Ranges, facts: Facts) -> Ranges:
    """Return ranges that reach further by :data:`WIDER` of each one's length on either side, and by one step's samples at least."""
    read = max((end - first for first, end in facts.samples), default=1)
    return merge_ranges(
        [
            (max(0, first - more), end + more)
            for first, end in ranges
            for more in [max(read, round(WIDER * (end - first)))]
        ]
    )


def plan_stop(start: Start, why: str) -> Plan:
    """Make the plan that ends this attempt and starts no other."""
    return named(
        Plan(
            plan_id="",
            run_uid=start.run_uid,
            for_attempt=start.attempt + 1,
            action="stop",
            reasons={"action": why},
        )
    )


def close_look(facts: Facts, cause: str, target: int) -> CloseLook | None:
    """Return the steps around the onset, of those behind the target, where the cause is numeric and something was not finite."""
    if cause != "numeric" or not (facts.nonfinite.any() or facts.broken):
        return None
    first, last = max(target + 1, facts.onset - LOOK_BEFORE), max(target + 1, facts.onset) + LOOK_BEHIND
    return CloseLook(first_step=first, steps=last - first + 1)


def named(plan: Plan) -> Plan:
    """Return the plan with the id that its contents give: the same plan has the same id wherever it was made."""
    content = msgspec.json.encode(msgspec.structs.replace(plan, plan_id=""), order="sorted")
    return msgspec.structs.replace(plan, plan_id=f"plan_{sha256(content).hexdigest()[:20]}")


def _skip_mode(can_skip: Sequence[str]) -> SkipMode | None:
    if "substitute" in can_skip:
        return "substitute"
    return "shift" if "shift" in can_skip else None


def _of_line(alive: Alive, step: int) -> Trace | None:
    """Return the trace of the run's present line that holds ``step``: the start's own, or its parent's up to the resume."""
    if alive.first_step is not None and step >= alive.first_step:
        return alive.trace
    return alive.inherited


def expected_lr(alive: Alive, step: int, factor: float, executed: Sequence[Executed] = ()) -> float | None:
    """Return the rate at ``step`` as the broken line's record has it, times the plan's factor; what lowered it for a while left out.

    So is what the plan that this attempt began with did to it: a plan's factor and ramp end with the next one. None where that is not known.
    """
    own = alive.first_step is not None and step >= alive.first_step
    told = own and alive.plan_id is not None
    if not told and any(one.for_attempt < alive.start.attempt + own for one in executed):
        return None
    by_plan = _by_plan(alive, step) if own else 1.0
    return rate_at(_of_line(alive, step), step, factor / (multiplier(alive.lowered, step) * by_plan))


def _by_plan(alive: Alive, step: int) -> float:
    """Return what the plan that an attempt began with multiplies the scheduled rate by at a step of its own."""
    if alive.plan_id is None or alive.first_step is None:
        return 1.0
    ramp = min(1.0, (step - alive.first_step + 1) / alive.ramp_steps) if alive.ramp_steps else 1.0
    return alive.planned.lr_factor * ramp


def rate_at(trace: Trace | None, step: int, factor: float) -> float | None:
    """Return the rate that a trace has at ``step``, times ``factor``; None where it has none."""
    rate = None if trace is None else trace.at("lr", step)
    return None if rate is None else rate * factor


def expected_counter(alive: Alive, target: int) -> int | None:
    """Return the optimizer's own counter one update behind the state of step ``target``, whose line it is.

    A target from before this attempt began is of its parent's line: what this attempt's plan reset is not reset there.
    """
    return one_more(counter_after(_of_line(alive, target), target))


def one_more(counter: int | None) -> int | None:
    """Return a counter one update later."""
    return None if counter is None else counter + 1


def counter_after(trace: Trace | None, step: int) -> int | None:
    """Return the optimizer's own counter after ``step`` by a trace that holds it, from a measurement and the skipped steps between, or None."""
    if trace is None or not len(trace):
        return None
    counters = trace.column("optimizer_step")
    rows = (trace.measured("optimizer_step") & (counters >= 0) & (counters < LARGEST_COUNTER)).nonzero()[0]
    if not len(rows):
        return None
    steps = trace.steps[rows]
    place = max(0, int(np.searchsorted(steps, step, side="right")) - 1)  # one behind it may be of another line
    near = int(steps[place])
    if near < int(trace.steps[0]) or step < int(trace.steps[0]):
        return None
    value = int(counters[rows[place]])
    first, last = min(near, step), max(near, step)
    between = trace.column("skipped")[trace.rows(first + 1, last + 1)]
    skipped = int(min(float(np.nansum(np.clip(between, 0, None))), last - first))
    moved = (last - first) - skipped
    return value + moved if step >= near else value - moved
