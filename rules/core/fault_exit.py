"""The exit of a start that tells of a step made again: an incident that names the cause and the checkpoint to go on from (case E10).

Nothing is requested: the run has ended, and the framework expects to be started again. What it saved at its end is never the target.
"""

from __future__ import annotations

from trainwarden.record import Event

from .acting import roll_back
from .delivery import rank
from .incidents import conclude, facts_of, new_incident, open_incident
from .policy import Decision
from .rerun import FAILED, WORDS, code_of, words
from .state import Alive, Incident, RuleSeen, Run
from .turn import Turn

#: The name under which an incident holds what no rule saw.
RULE = "TrainingFaultExit"


def exited(turn: Turn, run: Run, alive: Alive, event: Event) -> None:
    """Take the exit of a start: its code is evidence, and where a fault was found the target is named though nothing is requested.

    Any program may exit with these codes. So without an open incident, a state that was kept for examination or a telling reason must
    vouch for the code.
    """
    code = code_of(event.fields)
    if code is None:
        return
    kept = any(one.quarantined and one.attempt == alive.start.attempt for one in run.checkpoints)
    said = any(word in str(event.fields.get("reason")).lower() for word, _ in WORDS)
    incident = open_incident(run, alive.start.start_id)
    if incident is None and not (kept or said or alive.rerun is not None):
        return
    alive.exit_code, alive.rerun = code, None
    incident = incident or _opened(run, alive, event)
    facts = facts_of(incident, alive, run)
    conclude(incident, facts, turn.settings.persist_steps)
    turn.note(incident, event.time, facts.now, words(code))
    if code == FAILED and incident.plan is None and incident.open:
        why = "What the framework saved at its end is for examination alone."
        roll_back(turn, run, alive, incident, facts, Decision("rollback", why, needs_approval=True), event.time)


def _opened(run: Run, alive: Alive, event: Event) -> Incident:
    now = int(alive.trace.steps[-1]) if len(alive.trace) else max(event.step or 0, 0)
    incident = new_incident(run, alive, now, event.time, onset=now)
    incident.since_start = None if alive.first_step is None else now - alive.first_step
    if not rank(incident.severity):
        incident.severity = "warning"
    incident.rules[RULE] = RuleSeen(now, now, "warning", "other", firing=False)
    return incident
