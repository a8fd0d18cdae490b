"""Ranks that report failures: an incident that names who was first, as far as clocks tell (case A33).

One rank that fails is its supervisor's business and has its log. Where several fail, all but the first are victims, and the first is
what a person must know.
"""

from __future__ import annotations

from trainwarden.record import Event
from trainwarden.rules.core.counted import counted

from .incidents import conclude, facts_of, new_incident, open_incident, raise_severity
from .machines import SKEW
from .state import Alive, Incident, RuleSeen, Run
from .turn import Turn

#: The name under which an incident holds what no rule sees.
RULE = "TrainingFailed"
#: Ranks that must have failed.
SEVERAL = 2


def failed(turn: Turn, run: Run, alive: Alive, event: Event) -> None:
    """Take a rank's failure, which is remembered already: open an incident or join the one there is, and say who was first."""
    failures = alive.machines.failures
    if len(failures) < SEVERAL:
        return
    incident = open_incident(run, alive.start.start_id) or _known(run, alive)
    fresh = incident is None or RULE not in incident.rules
    if not fresh and event.time > min(one.time for one in failures.values()) + 2 * SKEW:
        return
    incident = incident or _open(run, alive, event)
    if fresh:
        incident.rules[RULE] = RuleSeen(incident.onset, incident.opened_step, "warning", "stall", firing=False)
        incident.last_active_step = max(incident.last_active_step, incident.opened_step)
        turn.note(
            incident,
            event.time,
            event.step,
            f"{counted(len(failures), 'rank')} reported a failure within a short time.",
        )
    facts = facts_of(incident, alive, run)
    conclude(incident, facts, turn.settings.persist_steps)
    if incident.cause == "hardware":
        raise_severity(turn, incident, "critical")
    turn.touch(incident)


def _known(run: Run, alive: Alive) -> Incident | None:
    """Return the start's incident about failures, open or not."""
    for incident in run.incidents.values():
        if incident.start_id == alive.start.start_id and RULE in incident.rules:
            return incident
    return None


def _open(run: Run, alive: Alive, event: Event) -> Incident:
    now = int(alive.trace.steps[-1]) if len(alive.trace) else max(event.step or 0, 0)
    incident = new_incident(run, alive, now, event.time, onset=now)
    incident.verdict = "stall"
    incident.since_start = None if alive.first_step is None else now - alive.first_step
    return incident
