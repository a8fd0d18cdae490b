"""A lower learning rate for the running attempt: the plan, the step that it names, and whether the records show it.

The plan is decided without a step: it may wait for a person. The step is named when the request leaves, so far ahead that receiver and
all ranks have read it by then. Whether the rate was lowered, and whether it came back, is read from the records: the rate of a step
against that which the records before foretell. Reports of the ranks are only told; where they and the records disagree, the
records are believed. A lowering belongs to its start and ends with it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import msgspec
import numpy as np

from trainwarden.plan import MOST_LOWERED, Lowering, Plan
from trainwarden.record import Event, Step
from trainwarden.rules.core.counted import counted
from trainwarden.webhook import request_id

from .incidents import raise_severity
from .lowered import Lowered, multiplier
from .planning import Planned, named
from .settings import Settings
from .state import Alive, Asked, Incident, Run
from .stream import Released
from .turn import Turn

#: The kind of the exporters' events, and the states that they tell.
KIND = "lower_lr"
BEGAN, NOT_APPLIED = "began", "not_applied"
#: ``done`` of a request of which nothing more is to come.
OVER = ("refused", "expired", "failed", "undeliverable", NOT_APPLIED, "returned", "not_returned", "unverified")
#: Steps that the named one lies ahead at least, and at most: a clock that jumped must not put it into next year.
LEAST_AHEAD, MOST_AHEAD = 10, 1_000_000
#: Newest records before a step that foretell its rate.
LINE = 20
#: Steps behind the lowering within which a record must show a rate; else nothing can be verified.
PATIENT = 50
#: Relative difference of rates that are equal.
SAME = 1e-4
#: Characters of a reason that is told.
LONGEST = 300


# What is asked.


def plan_lower(alive: Alive, settings: Settings, number: int, why: str) -> Planned:
    """Make the plan that lowers the rate of the running attempt, as its ``number``-th (from 0). It names no step yet.

    The number is part of what the plan's id is made of: a second one of the attempt is another plan.
    """
    steps = min(settings.lower_lr_steps, MOST_LOWERED)
    back = min(settings.lower_lr_return_steps, MOST_LOWERED)
    start = alive.start
    how = f", then it comes back over {counted(back, 'step')}" if back else ""
    plan = Plan(
        plan_id="",
        run_uid=start.run_uid,
        for_attempt=start.attempt,
        action="lower_lr",
        lr_factor=settings.lower_lr_factor,
        lr_steps=steps,
        lr_return_steps=back,
        reasons={
            "lr_factor": why,
            "lr_steps": f"The rate is lowered for {counted(steps, 'step')}{how}: request {number + 1} of this attempt.",
        },
    )
    return Planned(named(plan), low_confidence=False)


def timed(plan: Plan, alive: Alive, settings: Settings, now: float) -> Plan:
    """Return the plan with the step from which on it holds: what the run does in ``lower_lr_ahead_seconds``, at its present pace."""
    trace = alive.trace
    newest = int(trace.steps[-1]) if len(trace) else alive.resumed_from or 0
    pace = max((trace.interval() or 1.0) / trace.stride(), 1e-6)
    age = now - alive.line.newest_time
    seconds = settings.lower_lr_ahead_seconds + (age if math.isfinite(age) and age > 0 else 0.0)
    ahead = min(max(LEAST_AHEAD, math.ceil(seconds / pace)), MOST_AHEAD)
    says = f"{counted(ahead, 'step')} behind the newest record, so that all ranks have read it by then."
    return msgspec.structs.replace(plan, at_step=newest + ahead, reasons={**plan.reasons, "at_step": says})


# What is heard and seen.


def awaited(run: Run, start_id: str) -> bool:
    """Say whether records of a start must be looked at one by one, because a lowering of it is not over."""
    return any(_goes_on(one) and one.start_id == start_id for one in run.asked)


def in_force(run: Run, incident: Incident) -> bool:
    """Say whether a lowering that was asked for an incident has not come to its end: until then nothing has healed."""
    return any(_goes_on(one) and one.incident == incident.id for one in run.asked)


def _goes_on(asked: Asked) -> bool:
    return asked.lowering is not None and asked.done not in OVER


def heard(turn: Turn, run: Run, alive: Alive, rank: int, event: Event) -> None:
    """Take what a rank says of a lowering. One that nobody here asked for is another daemon's, and looked at all the same."""
    fields = event.fields
    plan_id, state = fields.get("plan_id"), fields.get("state")
    if not isinstance(plan_id, str) or len(plan_id) > LONGEST:
        return
    start_id = alive.start.start_id
    asked = next((one for one in run.asked if one.plan_id == plan_id and one.start_id == start_id), None)
    if asked is None and state == BEGAN:
        asked = _of_another(run, alive, plan_id, fields)
    if asked is None or asked.lowering is None:
        return
    if state == NOT_APPLIED and rank not in asked.refusing and asked.lowered is None:
        asked.refusing.append(rank)
        reason = str(fields.get("reason"))[:LONGEST]
        if len(asked.refusing) == 1:
            who = f"Rank {rank}" if alive.line.world_size > 1 else "The run"
            _note(
                turn, run, asked, event.time, event.step, f"{who} says that the learning rate is not lowered: {reason}."
            )
        if len(asked.refusing) >= alive.line.world_size:
            asked.lowered, asked.done = False, NOT_APPLIED
            _tell(run, asked)


def _of_another(run: Run, alive: Alive, plan_id: str, fields: Mapping[str, Any]) -> Asked | None:
    """Take a lowering up that this core did not send, or did not send in this replay."""
    told = {name: fields.get(name) for name in ("factor", "first_step", "steps", "return_steps")}
    try:
        lowering = msgspec.convert(told, Lowering)
    except msgspec.ValidationError:
        return None
    longest = max(lowering.steps, lowering.return_steps)
    if not (0 < lowering.factor < 1 and 1 <= lowering.first_step < 2**53 and lowering.steps >= 1):
        return None
    if not 0 <= lowering.return_steps <= longest <= MOST_LOWERED:
        return None
    start = alive.start
    before = [one for one in run.asked if one.attempt == start.attempt]
    key = request_id(start.run_uid, start.attempt, KIND, len(before))
    step = int(alive.trace.steps[-1]) if len(alive.trace) else lowering.first_step - 1
    asked = Asked(KIND, "", start.attempt, plan_id, key, step, lowering.end - 1, "told", start.start_id, lowering)
    run.asked = [*before, asked]
    for incident in run.incidents.values():
        plan = incident.plan
        if incident.open and incident.start_id == start.start_id and plan is not None and plan.plan_id == plan_id:
            asked.incident, incident.webhook_id, incident.done = incident.id, key, "told"
            incident.plan = msgspec.structs.replace(plan, at_step=lowering.first_step)
    return asked


def observe(turn: Turn, run: Run, alive: Alive, released: Released) -> None:
    """Take a record: it may show that the rate was lowered, that it came back, or that ranks do not agree."""
    for asked in run.asked:
        if _goes_on(asked) and asked.start_id == alive.start.start_id:
            _look(turn, run, alive, asked, released)


def _look(turn: Turn, run: Run, alive: Alive, asked: Asked, released: Released) -> None:
    record, lowering = released.record, asked.lowering
    assert lowering is not None
    covered = record.step - record.stride + 1
    if record.step < lowering.first_step:
        asked.alike = _alike(released.by_rank) is None
        return
    apart = _alike(released.by_rank) if asked.alike else None
    if apart is not None and covered >= lowering.first_step:
        asked.alike = False
        says = f"At step {record.step} the ranks do not have one learning rate: {apart}. Replicas that step apart are none any more."
        _alarm(turn, run, asked, record, says)
    rate = record.value("lr")
    rate = rate if rate is not None and math.isfinite(rate) and rate > 0 else None
    if rate is None:
        if covered >= lowering.end + PATIENT:
            asked.done = "unverified"
            says = "No record of these steps has a learning rate: whether it was lowered and is back cannot be said."
            _note(turn, run, asked, record.time, record.step, says)
            _tell(run, asked)
    elif asked.lowered is None and covered >= lowering.first_step:
        _look_whether_lowered(turn, run, alive, asked, record, rate)
    if asked.lowered and asked.returned is None and covered >= lowering.end and rate is not None:
        _look_whether_back(turn, run, alive, asked, record, rate)


def _look_whether_lowered(turn: Turn, run: Run, alive: Alive, asked: Asked, record: Step, rate: float) -> None:
    lowering = asked.lowering
    assert lowering is not None
    wanted = float(np.mean([lowering.at(step) for step in range(record.step - record.stride + 1, record.step + 1)]))
    expected = _foretold(alive, asked, record.step, lowering.first_step)
    if expected is None or wanted == 1.0:  # no rate before it, or a record that only shows what is behind it
        asked.done = "unverified"
        _note(turn, run, asked, record.time, record.step, "No record before it has a learning rate to compare with.")
        _tell(run, asked)
        return
    others = multiplier(alive.lowered, record.step)
    found = rate / (expected * others)
    asked.lowered = abs(math.log(found / wanted)) <= 0.5 * abs(math.log(wanted))
    seen = f"The learning rate at step {record.step} is {rate:.4g}, {found:.3g} times the {expected * others:.4g} of the schedule"
    if asked.lowered:
        alive.lowered.append(Lowered(lowering, lowering.end - 1))
        asked.done = "lowered"
        _note(turn, run, asked, record.time, record.step, f"{seen}: it is lowered, {wanted:.3g} times was asked.")
        if asked.refusing:
            ranks = ", ".join(map(str, asked.refusing))
            says = f"The learning rate is lowered, but not on {'ranks' if len(asked.refusing) > 1 else 'rank'} {ranks}."
            _alarm(turn, run, asked, record, says)
    else:
        asked.done = NOT_APPLIED
        _note(turn, run, asked, record.time, record.step, f"{seen}: it is not lowered, {wanted:.3g} times was asked.")
    _tell(run, asked)


def _look_whether_back(turn: Turn, run: Run, alive: Alive, asked: Asked, record: Step, rate: float) -> None:
    lowering = asked.lowering
    assert lowering is not None
    expected = _foretold(alive, asked, record.step, lowering.returns)
    if expected is None:
        return
    found = rate / (expected * multiplier(alive.lowered, record.step))
    asked.returned = abs(math.log(found)) <= 0.5 * abs(math.log(lowering.factor))
    seen = f"The learning rate at step {record.step} is {rate:.4g}, {found:.3g} times that of the schedule"
    if asked.returned:
        asked.done = "returned"
        incident = run.incidents.get(asked.incident)
        if incident is not None and incident.open:  # whether it has healed shows at the scheduled rate alone
            incident.last_active_step = max(incident.last_active_step, record.step)
        _note(turn, run, asked, record.time, record.step, f"{seen}: it is back.")
    else:
        asked.done = "not_returned"
        _alarm(turn, run, asked, record, f"{seen}: it should be back, and is not.")
    _tell(run, asked)


def _foretold(alive: Alive, asked: Asked, step: int, before: int) -> float | None:
    """Return the schedule's rate at ``step`` by the newest records before step ``before``: the line through them, at most doubled or halved."""
    trace = alive.trace
    rows = slice(0, trace.row(min(before, step)))
    values = trace.column("lr")[rows]
    known = np.flatnonzero(np.isfinite(values) & (values > 0))[-LINE:]
    if not len(known):
        return None
    steps = trace.steps[rows][known]
    scheduled = values[known] / np.array([multiplier(alive.lowered, int(at)) for at in steps])
    last = float(scheduled[-1])
    if len(known) < 3:
        return last
    _, level = np.polyfit((steps - step).astype(np.float64), scheduled, 1)
    return float(min(max(level, last / 2), 2 * last))


def _alike(by_rank: Mapping[int, Step]) -> str | None:
    """Say which ranks have another learning rate than most, or None."""
    rates = {rank: rate for rank, record in by_rank.items() if (rate := record.value("lr")) is not None}
    if len(rates) < 2:
        return None
    usual = float(np.median(list(rates.values())))
    apart = {rank: rate for rank, rate in rates.items() if abs(rate - usual) > SAME * abs(usual)}
    if not apart:
        return None
    shown = ", ".join(f"rank {rank} {rate:.4g}" for rank, rate in sorted(apart.items())[:8])
    return f"{shown}, against {usual:.4g} in the middle"


def _note(turn: Turn, run: Run, asked: Asked, time: float, step: int | None, says: str) -> None:
    """Write it into the incident's timeline; what another daemon asked for, and no incident here, is a notice."""
    incident = run.incidents.get(asked.incident)
    if incident is not None:
        turn.note(incident, time, step, says)
    elif run.alive is not None:
        turn.notice(run.alive.start, KIND, step, says, "lr")


def _alarm(turn: Turn, run: Run, asked: Asked, record: Step, says: str) -> None:
    """Say what a person must look at."""
    incident = run.incidents.get(asked.incident)
    if incident is not None:
        raise_severity(turn, incident, "critical")
    _note(turn, run, asked, record.time, record.step, says)


def _tell(run: Run, asked: Asked) -> None:
    incident = run.incidents.get(asked.incident)
    if incident is not None and incident.webhook_id == asked.key:
        incident.done = asked.done
