"""A training that stands still: what a tick finds, and what becomes of it once records come again.

The rules of the clock say when it is a stall; here it becomes an incident. A stall is handed to a person and nothing else: no
record says what a rollback should undo. Where a run cannot be seen, nothing is known of its progress, and that is a notice.
"""

from __future__ import annotations

from trainwarden.record import Event, Step

from .devices_told import blame
from .facts import Finding
from .incidents import close, conclude, confirm, facts_of, fired, open_incident, raise_severity, resolved
from .progress import answered, budget, idle
from .reasoning import Reasoned
from .seeing import Change
from .state import Alive, Incident, Rules, RuleSeen, Run
from .stream import Line
from .triage import untold
from .turn import Turn

#: Idle seconds below which the rules of the clock are not looked at: a run that goes on costs a tick nothing.
LOOK_FROM = 30.0
#: What tells most about a hang, and costs one command a process.
TEST = (
    "Look at the stacks of all ranks (py-spy dump --pid PID): the one that is elsewhere than the others holds them up."
)


def look(turn: Turn, run: Run, alive: Alive, time: float) -> None:
    """Look at a start at a tick."""
    progress, rules = alive.progress, alive.rules
    assert isinstance(rules, Rules)
    if alive.ended is not None:
        return
    waited = idle(progress, time)
    if not waited >= LOOK_FROM and not rules.engine.waits:
        return
    seen = answered(alive.sources, alive.line.cursors, time, turn.settings.max_action_age)
    _unseen(turn, alive, time)
    known = seen is True and progress.timed and progress.phase != "exit" and waited >= 0
    step = _last(alive)
    allowed = budget(progress, alive.trace, turn.settings)
    moment = Step(seq=0, step=step, time=time)
    for change in rules.engine.tick(time, step, waited if known else None, allowed if known else None):
        if change.state == "firing":
            _fired(turn, run, alive, moment, change, waited, allowed)
        elif change.state in ("resolved", "unknown"):
            alive.firing.pop(change.rule, None)
            resolved(turn, run, alive, moment, change)
            incident = open_incident(run, alive.start.start_id)
            over = incident is not None and not any(one.firing for one in incident.rules.values())
            if incident is not None and incident.stood is not None and over and change.state == "resolved":
                _over(turn, incident, time, step, f"It goes on, in {progress.phase}")


def stepped_again(turn: Turn, incident: Incident, record: Step) -> None:
    """Take the first record behind a stall: it is over, or it has become something else."""
    if any(seen.firing for seen in incident.rules.values()):
        incident.stood, incident.action = None, "none"
    else:
        _over(turn, incident, max(record.time, turn.memory.now), record.step, "Records come again")


def exited(turn: Turn, run: Run, alive: Alive, event: Event) -> None:
    """Take the exit of a start: one that finished did not stand still for ever."""
    incident = open_incident(run, alive.start.start_id)
    if incident is not None and incident.stood is not None and event.fields.get("reason") == "finished":
        _over(turn, incident, max(event.time, turn.memory.now), _last(alive), "The run finished")


def _over(turn: Turn, incident: Incident, time: float, step: int, how: str) -> None:
    stood = words(time - (incident.stood or time))
    incident.summary += f" It stood still for {stood}."
    close(turn, incident, time, step, "recovered", f"{how}: it stood still for {stood}.")


def _last(alive: Alive) -> int:
    """Return the step of the last record, or the one that the start resumed from."""
    return int(alive.trace.steps[-1]) if len(alive.trace) else alive.resumed_from or 0


def _fired(turn: Turn, run: Run, alive: Alive, moment: Step, change: Change, waited: float, allowed: float) -> None:
    before = open_incident(run, alive.start.start_id)
    severity, offered = change.labels.get("severity", "warning"), change.labels.get("verdict", "")
    alive.firing[change.rule] = RuleSeen(change.since, moment.step, severity, offered)
    fired(turn, run, alive, moment, change)
    incident = open_incident(run, alive.start.start_id)
    if incident is None:
        return
    says = _says(alive, moment.step, waited, allowed)
    if incident.stood is None and incident is before:  # it joined: the loss decides what else is done
        if len(alive.trace):
            facts = facts_of(incident, alive, run)
            conclude(incident, facts, turn.settings.persist_steps)
            confirm(turn, incident, facts, moment.time)
        raise_severity(turn, incident, severity)
        turn.note(incident, moment.time, moment.step, says)
        return
    incident.stood = moment.time - waited
    incident.onset, incident.uncertainty = moment.step, 1
    incident.findings = [Finding(kind="progress", step=moment.step, says=says)]
    incident.cheapest_test = TEST
    incident.reasoned = Reasoned(triage=untold("No record tells of a run that stands still."))
    incident.summary = f"{incident.verdict.capitalize()} at step {moment.step}: {says[0].lower()}{says[1:]}"
    incident.ranks = _behind(alive.line)
    blame(incident, alive)
    if incident.severity == "critical":
        incident.action, incident.confirmed_step = "escalate", moment.step
        turn.note(incident, moment.time, moment.step, f"{says} Handed to a person.", "confirmed")


def _says(alive: Alive, step: int, waited: float, allowed: float) -> str:
    phase = alive.progress.phase
    where = {"init": "initialising", "train": "training"}.get(phase, phase)
    after = f"after step {step}" if len(alive.trace) else "since the start"
    known = alive.progress.spent.get(phase)
    usual = f", the longest so far took {words(max(one.seconds for one in known))}" if known else ""
    says = f"No sign of progress for {words(waited)} {after}, in {where} (budget {words(allowed)}{usual})."
    behind = _behind(alive.line)
    if behind:
        named = ", ".join(str(rank) for rank in behind)
        says += f" Rank{'s' if len(behind) > 1 else ''} {named} did not report step {alive.line.newest_step}."
    return says


def _behind(line: Line) -> list[int]:
    """Return the ranks that lack the newest step, where they are the fewer ones."""
    newest = max((cursor.last_step for cursor in line.cursors.values()), default=-1)
    found = sorted(rank for rank, cursor in line.cursors.items() if cursor.last_step < newest)
    return found if 2 * len(found) < len(line.cursors) else []


def _unseen(turn: Turn, alive: Alive, time: float) -> None:
    """Say once that a run cannot be seen, when it could not for long enough (cases E08 and F03)."""
    progress = alive.progress
    if not alive.sources or any(seen.reachable for seen in alive.sources.values()):
        progress.unseen, progress.missed = None, False
        return
    if progress.unseen is None:
        progress.unseen = time
    elif not progress.missed and time - progress.unseen >= turn.settings.unseen_seconds:
        progress.missed = True
        step = _last(alive)
        says = f"Since step {step} nothing can be read of this run: whether it trains is not known."
        turn.notice(alive.start, "unseen", step, says)


def words(seconds: float) -> str:
    """Return a duration as people say it: ``40 s``, ``24 min``, ``3 h 5 min``; nobody knows one that a lying clock tells."""
    if not 0 <= seconds < 1e12:
        return "an unknown time"
    if seconds < 100:
        return f"{seconds:.0f} s"
    minutes = round(seconds / 60)
    if minutes < 100:
        return f"{minutes} min"
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes} min" if minutes else f"{hours} h"
