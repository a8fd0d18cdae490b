"""A planned change in the life of a start: it is heard of, it begins, its burn-in ends.

It begins before the first record that is trained under it, and its burn-in ends before the first record behind it. Both times the
rules that it excuses begin anew: the records of the burn-in are no measure either. How the stream is cut, who of several ranks tells it
and how often, and whether it is told before or behind its last step makes no difference; news that comes later still finds what has
been judged, and takes back what is open.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from trainwarden.record import Event, Step

from .acting import escalate
from .facts import Finding
from .incidents import close, open_incident
from .planned import TOO_LATE, Announced, add, excuses, next_step, of_event, sentence
from .state import Alive, Incident, Rules, Run
from .turn import Turn

#: Records whose median is the level of the loss.
LEVEL_RECORDS = 50


def hear(turn: Turn, alive: Alive, rank: int, event: Event) -> None:
    """Take an event that may announce a planned change."""
    cursor = alive.line.cursors.get(rank)
    last_step = -1 if cursor is None else cursor.last_step
    change = of_event(event, last_step, turn.settings)
    if change is not None:
        add(alive.changes, change, max(last_step, alive.resumed_from or 0))
        alive.next_change = next_step(alive.changes)


def withheld(alive: Alive, rule: str, labels: Mapping[str, str]) -> bool:
    """Say whether an alert that fires now is excused: its rule is one that a change in its burn-in moves."""
    active = [one for one in alive.changes if one.began and not one.over]
    return bool(active) and any(excuses(one, labels, alive.rules.engine.reads(rule)) for one in active)


def cross(turn: Turn, run: Run, alive: Alive, record: Step) -> None:
    """Let changes begin and burn-ins end that lie before ``record``, the next one to be judged."""
    said: set[int] = set()
    for change in alive.changes:
        if not change.began and change.step < record.step:
            _begin(turn, run, alive, change, record)
            if any(_same(one, change) for changes in run.changes.values() for one in changes):
                change.quiet = True  # an attempt before has said it
            said.add(change.step)
    for change in alive.changes:
        if change.began and not change.over and change.end < record.step:
            _finish(turn, run, alive, change, record)
            said.add(change.step)
    for step in sorted(said):
        told = [one for one in alive.changes if one.step == step and one.began and not one.quiet]
        for kind, of_the_log, signal in (("planned_change", False, None), ("metric_scope", True, "loss")):
            some = [one for one in told if one.of_the_log is of_the_log]
            if some:
                turn.notice(alive.start, kind, step, sentence(some), signal)
    alive.next_change = next_step(alive.changes)


def _same(before: Announced, change: Announced) -> bool:
    return before.began and not before.quiet and (before.kind, before.step) == (change.kind, change.step)


def _begin(turn: Turn, run: Run, alive: Alive, change: Announced, record: Step) -> None:
    change.began = True
    unused = alive.first_step is None  # no record of this start was judged yet: its rules are new
    covered = record.step - record.stride
    if covered - change.end > TOO_LATE or (unused and change.end <= covered and change.step < covered):
        change.over = change.quiet = True
        return
    if change.before is None:
        change.before = _level(alive, change.step)
    if unused:
        return
    anew = _anew(alive, change)
    incident = open_incident(run, alive.start.start_id)
    if incident is not None:
        _explain(turn, incident, change, anew, record)


def _finish(turn: Turn, run: Run, alive: Alive, change: Announced, record: Step) -> None:
    change.over = True
    if len(alive.trace):
        change.after = _level(alive, change.end, change.step)
    anew = _anew(alive, change)
    incident = open_incident(run, alive.start.start_id)
    if incident is None:
        return
    _unfire(incident, anew)
    if incident.excused:
        says = f"The burn-in of the planned change of {change.name} is over; what is usual is learned anew."
        close(turn, incident, record.time, record.step, "inconclusive", says)


def _anew(alive: Alive, change: Announced) -> set[str]:
    """Have the rules begin anew that a change excuses, and return their names."""
    rules: Rules = alive.rules
    engine = rules.engine
    anew = {name for name, labels in engine.labels().items() if excuses(change, labels, engine.reads(name))}
    engine.begin_anew(anew)
    for name in anew:
        alive.firing.pop(name, None)
    return anew


def _unfire(incident: Incident, rules: set[str]) -> None:
    for name, seen in incident.rules.items():
        if name in rules:
            seen.firing = False


def _explain(turn: Turn, incident: Incident, change: Announced, anew: set[str], record: Step) -> None:
    """Say what a change means for the incident that is open when it begins."""
    firing = {name for name, seen in incident.rules.items() if seen.firing and name not in anew}
    _unfire(incident, anew)
    planned = "change of what is logged:" if change.of_the_log else "planned change of"
    what = f"{planned} {change.name} after step {change.step}"
    cause = "instrument" if change.of_the_log else "planned_change"
    if set(incident.rules) <= anew and min(seen.since for seen in incident.rules.values()) > change.step:
        says = f"It is the {what}, of which the news came late."
        incident.cause, incident.confidence, incident.scores = cause, 1.0, {cause: 1.0}
        incident.findings = [*incident.findings, Finding(kind=cause, step=change.step, says=says)]
        if incident.state == "acting":
            turn.note(incident, record.time, record.step, says)
        else:
            close(turn, incident, record.time, record.step, "dismissed", says)
    elif not change.everything or firing or incident.plan is not None:
        turn.note(incident, record.time, record.step, f"The {what} began; its rules begin anew.")
    else:
        says = f"Behind the {what} nothing can be compared with what was before."
        if incident.severity == "critical":
            escalate(turn, incident, record.time, record.step, says)
        else:
            close(turn, incident, record.time, record.step, "inconclusive", says)


def _level(alive: Alive, last: int, after: int = -1) -> float | None:
    """Return the median loss of the newest records up to step ``last`` and behind ``after``, this start's or its parent's."""
    for trace in (alive.trace, alive.inherited):
        if trace is None:
            continue
        rows = trace.rows(after + 1, last + 1)
        losses = trace.column("loss")[max(rows.start, rows.stop - LEVEL_RECORDS) : rows.stop]
        losses = losses[np.isfinite(losses)]
        if len(losses):
            return float(np.median(losses))
    return None
