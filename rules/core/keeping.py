"""What is kept because of an incident: the last good checkpoint, and a copy of the damaged state. Asked for once, of the receiver."""

from __future__ import annotations

from .delivery import pin, quarantine, rank
from .gates import silenced
from .incidents import beta2_of
from .state import Alive, Incident, Run
from .targets import choose
from .turn import Turn


def keep_target(turn: Turn, run: Run, incident: Incident, time: float) -> None:
    """Note the last good checkpoint, and ask the receiver to keep what a rollback may need, when an incident is more than information.

    At its opening the cause is not known: the newest one before the onset is kept, and the newest that is older by one memory of the second
    moment. Later the target of a plan is, if it is neither: it may wait for long.
    """
    if incident.last_good is None and rank(incident.severity):
        chosen = choose(run.checkpoints, run.executed, incident.onset, incident.uncertainty, "data", None)
        incident.last_good = None if chosen is None else chosen.target
    if not turn.settings.receiver or rank(incident.severity) == 0:
        return
    wanted = [] if incident.plan is None or incident.plan.target is None else [incident.plan.target]
    if not incident.kept:
        incident.kept = True
        beta2 = None if run.alive is None else beta2_of(run.alive)
        for cause, memory in (("data", None), ("optimizer_state", beta2)):
            chosen = choose(run.checkpoints, run.executed, incident.onset, incident.uncertainty, cause, memory)
            if chosen is not None:
                wanted.append(chosen.target)
    for target in wanted:
        if target.path not in incident.pinned:
            incident.pinned.append(target.path)
            turn.effects.append(pin(incident, target, turn.settings, time))


def keep_damage(turn: Turn, run: Run, alive: Alive, incident: Incident, time: float) -> None:
    """Ask once for a copy of the damaged state, of a confirmed incident in a run that may be asked for anything.

    A run that stands still reaches no step at which it could save.
    """
    settings = turn.settings
    if incident.evidence_id is not None or not (settings.quarantine and settings.receiver):
        return
    if incident.confirmed_step is None or incident.stood is not None or rank(incident.severity) == 0:
        return
    if incident.state == "recovered" or silenced(incident, turn.memory.silences, time):
        return
    if not all(seen.authenticated and seen.may_act for seen in alive.sources.values()):
        return
    asked = [one for one in run.incidents.values() if one.evidence_id is not None]
    before = sum(one.attempt == incident.attempt for one in asked)
    chosen = choose(run.checkpoints, run.executed, incident.onset, incident.uncertainty, "data", None)
    last_good = None if chosen is None else chosen.target
    effect = quarantine(incident, last_good, before, settings, time)
    incident.evidence_id, incident.evidence_until = effect.key, effect.created + settings.quarantine_seconds
    turn.effects.append(effect)
