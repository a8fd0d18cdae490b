"""What becomes of an incident when a device tells of an error, or has told of one before.

The event may come before the incident or behind it: a device that is lost takes the records with it, and its hang is found minutes
later. A hang is not judged by records, so what is known of the devices is added to what was said of it.
"""

from __future__ import annotations

from . import devices
from .attribution import weigh
from .attribution.device_errors import errors
from .incidents import conclude, facts_of, open_incident
from .reasoning import answered
from .state import Alive, Incident, Run
from .turn import Turn


def device_failed(turn: Turn, run: Run, alive: Alive) -> None:
    """Take an error that a device told, which is remembered already: an open incident may have its cause in it."""
    incident = open_incident(run, alive.start.start_id)
    if incident is None:
        return
    if incident.stood is not None:
        blame(incident, alive)
    else:
        conclude(incident, facts_of(incident, alive, run), turn.settings.persist_steps)
    turn.touch(incident)


def blame(incident: Incident, alive: Alive) -> None:
    """Add to a hang what the ranks' devices told near it: the findings, and the cause where they name one."""
    stride = alive.trace.stride() if len(alive.trace) else 1
    newest = max((one.step for one in alive.devices), default=0)
    told = devices.near(alive.devices, incident.onset, newest, stride)
    found = errors(told, incident.onset, stride)
    if not found:
        return
    says = [one.says for one in incident.findings]
    incident.findings = [
        *incident.findings,
        *(one for one in found if one.cause == "hardware" and one.says not in says),
    ]
    if found[0].says not in incident.summary:
        incident.summary += f" {found[0].says}"
    cause = weigh(found, incident.onset)
    if cause.name != "hardware":
        return
    incident.cause, incident.confidence, incident.scores = cause.name, cause.confidence, cause.scores
    incident.reasoned = answered(incident.reasoned, "device_errors", "found", found[0].says, cause.explained)
    incident.ranks = sorted({*incident.ranks, told[0].rank})
    if told[0].host and told[0].host not in incident.hosts:
        incident.hosts = [*incident.hosts, told[0].host]
