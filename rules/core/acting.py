"""From decision to delivery: policy decides on records, planning makes the plan, gates open on polls, the request leaves once.

What is decided depends on records and events alone, so live and replay decide the same; when it is delivered depends on the
present, which only polls, ticks and people tell. Every decision keeps the answers of all gates.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import cast

from msgspec import structs

from trainwarden.plan import Plan, merge_ranges
from trainwarden.ranges import without
from trainwarden.record import Ranges
from trainwarden.rules.core.counted import counted

from . import gates, soft
from .attribution import Cause
from .delivery import request
from .facts import Facts
from .gates import Present
from .grounds import Past
from .incidents import close, open_incident, raise_severity
from .inputs import Command, Receipt
from .planning import Planned, Refusal, plan_rollback, plan_stop
from .policy import SOFT, Decision, Wanted, decide
from .probing import begun, plan_probe
from .state import Alive, Asked, GateAnswer, Incident, Requested, Run
from .suspects import suspects
from .targets import abandoned, usable
from .turn import Turn

#: Answers of a receiver after which the request is settled without a restart.
REFUSALS = ("refused", "expired", "failed", "undeliverable")
#: Seconds after a request's expiry that a restart may still take to show.
PATIENCE_SECONDS = 600.0
#: Actions that leave the attempt running: more may be decided while one is under way.
RUNNING = ("lower_lr",)


def past(run: Run, alive: Alive, step: int, incident: Incident | None = None) -> Past:
    """Return what was done to the run before, and how long this attempt has run. ``incident``: a target is older than its onset."""
    first = alive.first_step if alive.first_step is not None else step
    asked = [one for one in run.asked if one.attempt == alive.start.attempt]
    probes = {one.plan_id for one in run.probed}
    for one in run.incidents.values():
        if one.plan is not None and one.plan.action == "probe" and one.webhook_id is not None:
            probes.add(one.plan.plan_id)
    return Past(
        rollbacks=len({plan.plan_id for plan in run.executed if not plan.probe}),
        rolled_back=alive.plan_id is not None and alive.probe is None,
        steps_run=step - first + 1,
        ramp_steps=alive.ramp_steps,
        answered=any(one.attempt == alive.start.attempt and one.answer == "again" for one in run.probed),
        mismatch=alive.mismatch,
        handed_over=any(_went_wrong(one) for one in run.incidents.values()),
        targets=incident is None or bool(usable(run.checkpoints, run.executed, incident.onset - incident.uncertainty)),
        lowered=len(asked),
        lowered_at=asked[-1].step if asked else None,
        lowered_until=asked[-1].until_step if asked else None,
        refused=any(one.done in (*REFUSALS, soft.NOT_APPLIED) for one in asked),
        probed=len(probes),
    )


def _went_wrong(incident: Incident) -> bool:
    """Say whether a rollback was handed to a person, as not applied or refused, who has not acknowledged it."""
    tried = incident.webhook_id is not None or incident.verification is not None
    return incident.state == "escalated" and tried and incident.acknowledged_by is None


def consider(turn: Turn, run: Run, alive: Alive, incident: Incident, facts: Facts, cause: Cause, time: float) -> None:
    """Decide about an open incident, or look again at a plan that waits."""
    if incident.state == "acting" or incident.action == "escalate":
        return
    plan = incident.plan
    if plan is not None and plan.action not in RUNNING:
        _look_again(turn, run, alive, incident, facts, time)
        return
    history = past(run, alive, facts.now, incident)
    decision = decide(facts, cause, history, turn.settings, incident.verdict, incident.severity)
    waits = plan is not None and incident.webhook_id is None
    if decision.action == "none":
        if waits:
            give_up(turn, incident, time, facts.now, "Nothing speaks for it any more.")
        return
    if plan is not None and waits and decision.action == plan.action:
        return
    given = gates.answers(decision.action, _present(turn, run, incident, history), turn.memory.now)
    held = gates.held_by(given, gates.DECIDING)
    if held is not None:
        if incident.held_by != held:
            incident.held_by, incident.gates = held, given
            turn.note(incident, time, facts.now, f"{decision.why} {_why(given, held)}")
        return
    planned = _planned(turn, run, alive, incident, facts, decision)
    if isinstance(planned, Refusal) and decision.action in SOFT:
        says = f"{decision.why} That cannot be planned: {planned.why}."
        if all(entry.says != says for entry in incident.timeline):
            turn.note(incident, time, facts.now, says)
        without = structs.replace(turn.settings, probe=False, lower_lr=False)
        decision = decide(facts, cause, history, without, incident.verdict, incident.severity)
        if decision.action == "none":
            return
        planned = _planned(turn, run, alive, incident, facts, decision)
    if plan is not None:
        give_up(turn, incident, time, facts.now, "More must be done.")
    incident.held_by, incident.gates = None, given
    if planned is None:
        escalate(turn, incident, time, facts.now, decision.why)
    else:
        _take_up(turn, run, alive, incident, decision, planned, time, facts.now)


def roll_back(
    turn: Turn, run: Run, alive: Alive, incident: Incident, facts: Facts, decision: Decision, time: float
) -> None:
    """Make the plan for a decided rollback or probe, or hand over to a person where none can be made."""
    planned = _planned(turn, run, alive, incident, facts, decision)
    assert planned is not None
    _take_up(turn, run, alive, incident, decision, planned, time, facts.now)


def _planned(
    turn: Turn, run: Run, alive: Alive, incident: Incident, facts: Facts, decision: Decision
) -> Planned | Refusal | None:
    """Return the plan that carries a decision out, or why there is none; None for one that needs no plan."""
    plan = PLANS.get(decision.action)
    return None if plan is None else plan(turn, run, alive, incident, facts, decision)


def _rollback(
    turn: Turn, run: Run, alive: Alive, incident: Incident, facts: Facts, decision: Decision
) -> Planned | Refusal:
    return plan_rollback(
        facts,
        incident.cause,
        alive,
        run.checkpoints,
        run.executed,
        turn.settings,
        incident.further_than,
        _earlier_plan(run, incident),
        _asked_about(run, incident),
    )


def _probe(
    turn: Turn, run: Run, alive: Alive, incident: Incident, facts: Facts, decision: Decision
) -> Planned | Refusal:
    return plan_probe(facts, alive, run.checkpoints, run.executed, run.probed, turn.settings, incident.confirmed_step)


def _stop(turn: Turn, run: Run, alive: Alive, incident: Incident, facts: Facts, decision: Decision) -> Planned:
    return Planned(plan_stop(alive.start, decision.why), low_confidence=False)


def _lower(turn: Turn, run: Run, alive: Alive, incident: Incident, facts: Facts, decision: Decision) -> Planned:
    made = sum(one.attempt == alive.start.attempt for one in run.asked)
    return soft.plan_lower(alive, turn.settings, made, decision.why)


#: How the plan of each action is made that needs one.
PLANS: Mapping[str, Callable[[Turn, Run, Alive, Incident, Facts, Decision], Planned | Refusal]] = MappingProxyType(
    {"rollback": _rollback, "stop": _stop, "probe": _probe, "lower_lr": _lower}
)


def _take_up(
    turn: Turn,
    run: Run,
    alive: Alive,
    incident: Incident,
    decision: Decision,
    planned: Planned | Refusal,
    time: float,
    step: int,
) -> None:
    """Let a decision's plan wait for its gates, or hand over to a person where there is none."""
    if isinstance(planned, Refusal):
        incident.advice = [planned.advice] if planned.advice else []
        escalate(turn, incident, time, step, f"{decision.why} No {decision.action} can be planned: {planned.why}.")
        return
    incident.advice = list(planned.advice)
    incident.action = decision.action
    incident.needs_approval = decision.needs_approval or planned.low_confidence
    if decision.action not in SOFT:
        raise_severity(turn, incident, "critical")
    _adopt(turn, run, alive, incident, planned.plan, time, step, decision.why)


def _present(turn: Turn, run: Run, incident: Incident, history: Past) -> Present:
    return Present(incident, run, run.alive, turn.memory, turn.settings, history)


def _why(given: Sequence[GateAnswer], gate: str) -> str:
    return next(one.why for one in given if one.gate == gate)


def _adopt(
    turn: Turn, run: Run, alive: Alive, incident: Incident, plan: Plan, time: float, step: int, why: str
) -> None:
    memory = turn.memory
    incident.plan = plan
    incident.decided_time = memory.now if math.isfinite(memory.now) else time
    incident.gates = gates.answers(
        cast(Wanted, plan.action), _present(turn, run, incident, past(run, alive, step)), memory.now
    )
    incident.held_by = gates.held_by(incident.gates)
    held = {None: "", "approval": " It waits for a person's approval.", "mode": " It is only said, not done."}
    state = "awaiting_approval" if incident.held_by == "approval" else "confirmed"
    if incident.confirmed_step is None:
        incident.confirmed_step = step
    says = f"{why} Decided: {_what(plan)}.{held.get(incident.held_by, f' Held by {incident.held_by}.')}"
    turn.note(incident, time, step, says, "awaiting_approval" if state == "awaiting_approval" else "confirmed")


def _what(plan: Plan) -> str:
    """Return what a plan does in a few words."""
    if plan.action == "stop":
        return "stop the run"
    if plan.action == "lower_lr":
        back = f" and back over {counted(plan.lr_return_steps, 'step')}" if plan.lr_return_steps else ""
        return f"{plan.lr_factor:g} times the learning rate for {counted(plan.lr_steps, 'step')}{back}"
    where = "" if plan.target is None else f" to step {plan.target.step}"
    skip = sum(end - first for first, end in plan.skip_samples)
    if plan.probe is not None:
        return f"probe from step {plan.target.step if plan.target else 0}. {plan.reasons.get('probe', '')}".rstrip(". ")
    what = "Rollback"
    return f"{what}{where}" + (f", skipping {counted(skip, 'sample')}" if skip else "")


def give_up(turn: Turn, incident: Incident, time: float, step: int | None, why: str) -> None:
    """Take back a decision, or leave one behind that was carried out in the running attempt."""
    sent = incident.webhook_id is not None
    incident.plan = incident.approved_plan = incident.approved_by = None
    incident.webhook_id = incident.expires_at = incident.decided_time = incident.held_by = None
    incident.action, incident.done, incident.needs_approval, incident.gates = "none", None, False, []
    turn.note(incident, time, step, why if sent else f"{why} The plan is taken back.", "confirmed")


def _look_again(turn: Turn, run: Run, alive: Alive, incident: Incident, facts: Facts, time: float) -> None:
    """Make a waiting plan anew where its target is gone or the dirt has spread beyond its skip; take back a stop that is none any more."""
    plan = incident.plan
    if plan is None or incident.webhook_id is not None:
        return
    if plan.action == "stop":
        if facts.records and not facts.nonfinite[-1]:
            give_up(turn, incident, time, facts.now, "The loss is a number again.")
        return
    lost = plan.target is not None and any(
        checkpoint.path == plan.target.path
        and checkpoint.step == plan.target.step
        and (checkpoint.deleted or checkpoint.finite is False or abandoned(checkpoint, run.executed))
        for checkpoint in run.checkpoints
    )
    spread = False
    if incident.state == "awaiting_approval" and plan.skip_samples and facts.dirty.any():
        found = suspects(facts)
        spread = bool(without(found.ranges, plan.skip_samples))
    if not lost and not spread:
        return
    why = "The checkpoint of the plan is gone." if lost else "The dirty data has spread beyond the plan's skip."
    incident.approved_plan = incident.approved_by = None
    incident.plan = None
    again = cast(Wanted, plan.action)
    roll_back(turn, run, alive, incident, facts, Decision(again, why, incident.needs_approval), time)


def _earlier_plan(run: Run, incident: Incident) -> Plan | None:
    before = run.incidents.get(incident.follows or "")
    if before is None or before.state != "not_recovered" or incident.further_than is None:
        return None
    return before.verification.plan if before.verification is not None else before.plan


def _asked_about(run: Run, incident: Incident) -> tuple[Ranges, int] | None:
    """Return the suspect samples, with their epoch, of the incident whose probe showed that they do it again."""
    before = run.incidents.get(incident.follows or "")
    if before is None or all(one.incident != before.id or one.answer != "again" for one in run.probed):
        return None
    shards = begun(run.traces.get(before.attempt), before.onset)
    return merge_ranges([*before.suspect_samples, *shards]), before.suspect_epoch


def escalate(turn: Turn, incident: Incident, time: float, step: int | None, why: str) -> None:
    """Hand an incident over to a person: the end of what is done automatically."""
    if incident.action == "none":
        incident.action = "escalate"
    raise_severity(turn, incident, "critical")
    close(turn, incident, time, step, "escalated", f"{why} Handed over to a person.")


def deliver(turn: Turn, run: Run) -> None:
    """Deliver the run's decided action if all gates are open now."""
    alive = run.alive
    if alive is None:
        return
    incident = open_incident(run, alive.start.start_id)
    if incident is None or incident.plan is None or incident.state not in ("confirmed", "awaiting_approval"):
        return
    if incident.webhook_id is not None:  # what leaves the attempt running has been asked for
        return
    now = turn.memory.now
    step = int(alive.trace.steps[-1]) if len(alive.trace) else None
    given = gates.answers(
        cast(Wanted, incident.plan.action), _present(turn, run, incident, past(run, alive, step or 0)), now
    )
    if _too_late(turn, alive, incident, given, now, step):
        return
    held = gates.held_by(given)
    if held is not None:
        told = [(one.gate, one.answer, one.until) for one in incident.gates]
        if held != incident.held_by or told != [(one.gate, one.answer, one.until) for one in given]:
            incident.held_by, incident.gates = held, given
            turn.touch(incident)
        return
    _send(turn, run, alive, incident, given, now, step)


def _too_late(
    turn: Turn, alive: Alive, incident: Incident, given: Sequence[GateAnswer], now: float, step: int | None
) -> bool:
    """Hand over what waited for so long that it is not done any more, where it could have been done at all."""
    late = any(one.gate == "expired" and one.answer == "deny" for one in given)
    if not late or turn.settings.mode == "observe" or not alive.sources:
        return False
    says = f"{_why(given, 'expired')} It was held by {incident.held_by}."
    if incident.action in RUNNING:
        give_up(turn, incident, now, step, says)
    else:
        incident.gates = list(given)
        escalate(turn, incident, now, step, says)
    return True


def _send(
    turn: Turn, run: Run, alive: Alive, incident: Incident, given: list[GateAnswer], now: float, step: int | None
) -> None:
    plan = incident.plan
    assert plan is not None
    asked = [one for one in run.asked if one.attempt == incident.attempt]
    if plan.action in RUNNING:
        plan = incident.plan = soft.timed(plan, alive, turn.settings, now)
    effect = request(incident, turn.settings, now, len(asked) if plan.action in RUNNING else 0)
    incident.gates, incident.held_by = given, None
    incident.webhook_id, incident.expires_at, incident.done = effect.key, effect.expires_at, "requested"
    turn.effects.append(effect)
    if plan.action in RUNNING:
        last = None if plan.lowering is None else plan.lowering.end - 1
        asked.append(
            Asked(
                plan.action,
                incident.id,
                incident.attempt,
                plan.plan_id,
                effect.key,
                step or incident.onset,
                last,
                start_id=incident.start_id,
                lowering=plan.lowering,
            )
        )
        run.asked = asked
        says = f"A lower learning rate from step {plan.at_step} on is requested ({effect.key})."
        turn.note(incident, now, step, says, "confirmed")
        return
    memory = turn.memory
    memory.requested = [one for one in memory.requested if one.time > now - gates.DAY and one.key != effect.key]
    memory.requested.append(Requested(now, incident.run_uid, effect.key))
    turn.note(incident, now, step, f"The {plan.action} is requested ({effect.key}).", "acting")


def received(turn: Turn, receipt: Receipt) -> None:
    """Take a receiver's answer."""
    for run in turn.memory.runs.values():
        for incident in run.incidents.values():
            if incident.webhook_id == receipt.request_id:
                _answered(turn, run, incident, receipt)
            elif incident.evidence_id == receipt.request_id and receipt.status in REFUSALS:
                incident.evidence_until = None  # there will be no copy to wait for


def _answered(turn: Turn, run: Run, incident: Incident, receipt: Receipt) -> None:
    if incident.done == receipt.status or incident.plan is None:
        return
    running = incident.plan.action in RUNNING
    if incident.state != "acting" and not (running and incident.open):
        return
    why = f" ({receipt.reason}{': ' if receipt.reason and receipt.detail else ''}{receipt.detail})"
    why = why if receipt.reason or receipt.detail else ""
    if any(one.key == receipt.request_id and one.lowered is not None for one in run.asked):
        return  # the records have spoken
    incident.done = receipt.status
    says = f"The receiver says {receipt.status}{why}."
    for asked in run.asked:
        if asked.key == receipt.request_id:
            asked.done = receipt.status
    if receipt.status in REFUSALS:
        memory = turn.memory
        memory.requested = [one for one in memory.requested if one.key != receipt.request_id]
    if receipt.status in REFUSALS and running:
        raise_severity(turn, incident, "critical")  # a person is told; what else must be done is still to be decided
        turn.note(incident, receipt.time, None, says)
    elif receipt.status in REFUSALS:
        escalate(turn, incident, receipt.time, None, says)
    elif incident.plan.action == "stop" and receipt.status == "executed":
        escalate(turn, incident, receipt.time, None, f"{says} The run is stopped: mend it before it starts again.")
    else:
        turn.note(incident, receipt.time, None, says)


def overdue(turn: Turn, run: Run) -> None:
    """Hand over a requested action that did not show long after its request expired."""
    for incident in run.incidents.values():
        expires = incident.expires_at
        if incident.state == "acting" and expires is not None and turn.memory.now > expires + PATIENCE_SECONDS:
            stop = incident.plan is not None and incident.plan.action == "stop"
            follows = "nobody said that it was done" if stop else "no restart followed"
            what = "rollback" if incident.plan is None else incident.plan.action
            escalate(turn, incident, turn.memory.now, None, f"The {what} was requested and {follows}.")


def commanded(turn: Turn, command: Command) -> None:
    """Take an operator's word about one incident."""
    for run in turn.memory.runs.values():
        incident = run.incidents.get(command.incident or "")
        if incident is not None:
            _obey(turn, run, incident, command)


def _obey(turn: Turn, run: Run, incident: Incident, command: Command) -> None:
    said = f": {command.comment}" if command.comment else "."
    if command.name == "acknowledge":
        incident.acknowledged_by = command.author
        turn.note(incident, command.time, None, f"Acknowledged by {command.author}{said}")
    elif command.name == "dismiss":
        if incident.ended:
            return
        close(turn, incident, command.time, None, "dismissed", f"Dismissed by {command.author}{said}")
    elif command.name == "approve":
        plan = incident.plan
        if plan is None or incident.state not in ("confirmed", "awaiting_approval"):
            turn.note(incident, command.time, None, f"{command.author} approved, but nothing waits for approval.")
        elif command.plan_id != plan.plan_id:
            turn.note(
                incident,
                command.time,
                None,
                f"{command.author} approved plan {command.plan_id}, but it is now {plan.plan_id}: look again.",
            )
        else:
            incident.approved_plan, incident.approved_by = plan.plan_id, command.author
            turn.note(incident, command.time, None, f"Approved by {command.author}{said}")
            deliver(turn, run)
