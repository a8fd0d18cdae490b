"""Whether a decided action may be delivered now (design §3.6). The first gate that is shut names what holds it.

Gates look at the present: at the source's polls, the clock of the inputs and people's words. They never change what was decided.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

from .settings import Settings
from .state import Alive, Incident, Silence

#: Usual record intervals after which the newest record is too old to act on.
INTERVALS = 3


def held_by(
    incident: Incident, alive: Alive | None, silences: list[Silence], settings: Settings, now: float
) -> str | None:
    """Return the name of the first shut gate, or None where the action may be delivered.

    ``mode``, ``silenced``, ``start_ended``, ``approval``, ``no_receiver``, ``not_live`` (no poll ever: a file),
    ``unauthenticated``, ``not_allowed``, ``catching_up``, ``stale``, ``evidence`` (a copy of the damaged state is being made).
    """
    if settings.mode == "observe":
        return "mode"
    if silenced(incident, silences, now):
        return "silenced"
    if alive is None or alive.start.start_id != incident.start_id or alive.ended is not None:
        return "start_ended"
    if settings.mode == "approve" or incident.needs_approval:
        plan = incident.plan
        if plan is None or incident.approved_plan != plan.plan_id:
            return "approval"
    if not settings.receiver:
        return "no_receiver"
    held = _source(alive, settings, now)
    if held is None and incident.evidence_until is not None and now < incident.evidence_until:
        return "evidence"
    return held


def _source(alive: Alive, settings: Settings, now: float) -> str | None:
    if not alive.sources:
        return "not_live"
    rank = min(alive.sources)
    seen = alive.sources[rank]
    if not seen.authenticated:
        return "unauthenticated"
    if not seen.may_act:
        return "not_allowed"
    cursor = alive.line.cursors.get(rank)
    if not seen.caught_up or not seen.reachable or cursor is None or cursor.last_seq < seen.last_seq:
        return "catching_up"
    interval = alive.trace.interval() or 0.0
    oldest = now - max(settings.max_action_age, INTERVALS * interval)
    if math.isnan(alive.line.newest_time) or alive.line.newest_time < oldest:
        return "stale"
    return None


def silenced(incident: Incident, silences: list[Silence], now: float) -> bool:
    """Say whether a silence in force matches the incident."""
    facts = {"run": incident.run, "run_uid": incident.run_uid, "severity": incident.severity, "incident": incident.id}
    return any(_in_force(silence, now) and _matches(silence.matchers, facts) for silence in silences)


def _in_force(silence: Silence, now: float) -> bool:
    return silence.until is None or silence.until > now


def _matches(matchers: Mapping[str, str], facts: Mapping[str, str]) -> bool:
    return all(facts.get(name) == value for name, value in matchers.items())
