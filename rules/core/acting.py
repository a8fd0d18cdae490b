"""From decision to delivery: policy decides on records, planning makes the plan, gates open on polls, the request leaves once.

What is decided depends on records and events alone, so live and replay decide the same; when it is delivered depends on the
present, which only polls, ticks and people tell.
"""

from __future__ import annotations

from trainwarden.plan import Plan
from trainwarden.rules.core.counted import counted

from . import gates
from .attribution import Cause
from .delivery import request
from .facts import Facts
from .incidents import close, open_incident, raise_severity
from .inputs import Command, Receipt
from .planning import Refusal, plan_rollback
from .policy import Decision, Past, decide
from .recovery import common
from .state import Alive, Incident, Run
from .suspects import suspects
from .targets import abandoned
from .turn import Turn

#: Answers of a receiver after which the request is settled without a restart.
REFUSALS = ("refused", "expired", "failed", "undeliverable")
#: Seconds after a request's expiry that a restart may still take to show.
PATIENCE_SECONDS = 600.0


def past(run: Run, alive: Alive, step: int) -> Past:
    """Return what was done to the run before, and how long this attempt has run."""
    first = alive.first_step if alive.first_step is not None else step
    return Past(
        rollbacks=len({plan.plan_id for plan in run.executed}),
        rolled_back=alive.plan_id is not None,
        steps_run=step - first + 1,
        ramp_steps=alive.ramp_steps,
        mismatch=alive.mismatch,
        handed_over=any(_went_wrong(one) for one in run.incidents.values()),
    )


def _went_wrong(incident: Incident) -> bool:
    """Say whether a rollback was handed to a person, as not applied or refused, who has not acknowledged it."""
    tried = incident.webhook_id is not None or incident.verification is not None
    return incident.state == "escalated" and tried and incident.acknowledged_by is None


def consider(turn: Turn, run: Run, alive: Alive, incident: Incident, facts: Facts, cause: Cause, time: float) -> None:
    """Decide about an open incident, or look again at a plan that waits."""
    if incident.state == "acting" or incident.action == "escalate":
        return
    if incident.plan is not None:
        _look_again(turn, run, alive, incident, facts, time)
        return
    decision = decide(facts, cause, past(run, alive, facts.now), turn.settings)
    if decision.action == "none":
        if decision.held_by is not None and incident.held_by != decision.held_by:
            incident.held_by = decision.held_by
            turn.note(incident, time, facts.now, decision.why)
        return
    incident.held_by = None
    if decision.action == "escalate":
        escalate(turn, incident, time, facts.now, decision.why)
    else:
        roll_back(turn, run, alive, incident, facts, decision, time)


def roll_back(
    turn: Turn, run: Run, alive: Alive, incident: Incident, facts: Facts, decision: Decision, time: float
) -> None:
    """Make the plan for a decided rollback, or hand over to a person where none can be made."""
    earlier = _earlier_plan(run, incident)
    planned = plan_rollback(
        facts,
        incident.cause,
        alive,
        run.checkpoints,
        run.executed,
        turn.settings,
        incident.further_than,
        earlier,
    )
    if isinstance(planned, Refusal):
        escalate(turn, incident, time, facts.now, f"{decision.why} No rollback can be planned: {planned.why}.")
        return
    incident.action = "rollback"
    incident.needs_approval = decision.needs_approval or planned.low_confidence
    raise_severity(turn, incident, "critical")
    _adopt(turn, alive, incident, planned.plan, time, facts.now, decision.why)


def _adopt(turn: Turn, alive: Alive, incident: Incident, plan: Plan, time: float, step: int, why: str) -> None:
    incident.plan = plan
    incident.held_by = gates.held_by(incident, alive, turn.memory.silences, turn.settings, turn.memory.now)
    target = plan.target
    where = "" if target is None else f" to step {target.step}"
    skip = sum(end - first for first, end in plan.skip_samples)
    what = f"Rollback{where}" + (f", skipping {counted(skip, 'sample')}" if skip else "")
    held = {None: "", "approval": " It waits for a person's approval.", "mode": " It is only said, not done."}
    state = "awaiting_approval" if incident.held_by == "approval" else "confirmed"
    if incident.confirmed_step is None:
        incident.confirmed_step = step
    says = f"{why} Decided: {what}.{held.get(incident.held_by, f' Held by {incident.held_by}.')}"
    turn.note(incident, time, step, says, "awaiting_approval" if state == "awaiting_approval" else "confirmed")


def _look_again(turn: Turn, run: Run, alive: Alive, incident: Incident, facts: Facts, time: float) -> None:
    """Make a waiting plan anew where its target is gone or the dirt has spread beyond its skip."""
    plan = incident.plan
    if plan is None or incident.webhook_id is not None:
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
        spread = sum(end - first for first, end in found.ranges) > common(found.ranges, plan.skip_samples)
    if not lost and not spread:
        return
    why = "The checkpoint of the plan is gone." if lost else "The dirty data has spread beyond the plan's skip."
    incident.approved_plan = incident.approved_by = None
    incident.plan = None
    roll_back(turn, run, alive, incident, facts, Decision("rollback", why, incident.needs_approval), time)


def _earlier_plan(run: Run, incident: Incident) -> Plan | None:
    before = run.incidents.get(incident.follows or "")
    if before is None or before.state != "not_recovered" or incident.further_than is None:
        return None
    return before.verification.plan if before.verification is not None else before.plan


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
    now = turn.memory.now
    held = gates.held_by(incident, alive, turn.memory.silences, turn.settings, now)
    if held is not None:
        if held != incident.held_by:
            incident.held_by = held
            turn.touch(incident)
        return
    effect = request(incident, turn.settings, now)
    incident.held_by, incident.webhook_id, incident.expires_at = None, effect.key, effect.expires_at
    incident.done = "requested"
    turn.effects.append(effect)
    step = int(alive.trace.steps[-1]) if len(alive.trace) else None
    turn.note(incident, now, step, f"The rollback is requested ({effect.key}).", "acting")


def received(turn: Turn, receipt: Receipt) -> None:
    """Take a receiver's answer."""
    for run in turn.memory.runs.values():
        for incident in run.incidents.values():
            if incident.webhook_id == receipt.request_id:
                _answered(turn, incident, receipt)
            elif incident.evidence_id == receipt.request_id and receipt.status in REFUSALS:
                incident.evidence_until = None  # there will be no copy to wait for


def _answered(turn: Turn, incident: Incident, receipt: Receipt) -> None:
    if incident.state != "acting" or incident.done == receipt.status:
        return
    why = f" ({receipt.reason}{': ' if receipt.reason and receipt.detail else ''}{receipt.detail})"
    why = why if receipt.reason or receipt.detail else ""
    incident.done = receipt.status
    if receipt.status in REFUSALS:
        escalate(turn, incident, receipt.time, None, f"The receiver says {receipt.status}{why}.")
    else:
        turn.note(incident, receipt.time, None, f"The receiver says {receipt.status}{why}.")


def overdue(turn: Turn, run: Run) -> None:
    """Hand over a requested rollback that showed no restart long after its request expired."""
    for incident in run.incidents.values():
        expires = incident.expires_at
        if incident.state == "acting" and expires is not None and turn.memory.now > expires + PATIENCE_SECONDS:
            escalate(turn, incident, turn.memory.now, None, "The rollback was requested and no restart followed.")


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
