"""What is sent: notifications, and signed requests to the receiver. Contents only; the driver delivers."""

from __future__ import annotations

import math
from datetime import UTC, datetime
from typing import Any

import msgspec

from trainwarden import webhook
from trainwarden.plan import Plan, Quarantine, Target
from trainwarden.record import encode_numbers

from .effects import Deliver
from .gates import silenced
from .planning import named
from .rows import alerts, evidence, row
from .settings import Settings
from .state import Incident
from .turn import Turn, digest

#: Seconds for which a request to keep a checkpoint is worth sending.
PIN_SECONDS = 3600.0
SEVERITIES = ("info", "warning", "critical")


def rank(severity: str) -> int:
    """Return how grave a severity is; an unknown word counts as a warning."""
    return SEVERITIES.index(severity) if severity in SEVERITIES else 1


def iso(time: float) -> str:
    """Return Unix seconds as ISO 8601 in UTC; a time that is not known as the epoch."""
    return datetime.fromtimestamp(time if math.isfinite(time) else 0.0, UTC).isoformat()


def announce(turn: Turn, incident: Incident, time: float) -> None:
    """Notify when something changed that a person should know: opened, confirmed, decided, its severity, its end.

    Information is recorded and never sent; what was never announced has no end to announce.
    """
    phase = _phase(incident)
    if incident.severity == "info" and not incident.announced:
        return
    key = f"{incident.severity} {phase}"
    if key == incident.announced:
        return
    before = incident.announced.partition(" ")
    incident.announced = key
    if silenced(incident, turn.memory.silences, time):
        return
    event = _first(turn, incident) if not before[0] else phase if phase != before[2] else "severity"
    incident.told += 1
    turn.effects.append(
        Deliver(
            kind="notify",
            key=digest("notify", incident.id, str(incident.told)),
            run=incident.run,
            run_uid=incident.run_uid,
            incident=incident.id,
            body={"event": event, "incident": row(incident)},
            created=time if math.isfinite(time) else 0.0,
        )
    )


def _first(turn: Turn, incident: Incident) -> str:
    """Return ``opened``, or ``repeated`` where people were told of the same shape in the attempt before: news of one trouble (case E12)."""
    run = turn.memory.runs.get(incident.run_uid)
    before = None if run is None else run.incidents.get(incident.follows or "")
    return "repeated" if before is not None and before.announced and before.verdict == incident.verdict else "opened"


def _phase(incident: Incident) -> str:
    if incident.ended:
        return "ended"
    if incident.state == "watching":
        return "opened"
    if incident.state == "confirmed" and incident.action != "none":
        return "decided"
    return incident.state


def request(incident: Incident, settings: Settings, now: float, number: int = 0) -> Deliver:
    """Return the request to carry out the incident's plan. Its id says run, attempt, action and ``number``, and nothing else.

    ``number``: how many requests of an action that leaves the attempt running were made in it before.
    """
    assert incident.plan is not None
    action = incident.plan.action
    worth = settings.request_ttl
    if action == "lower_lr":  # behind its step it is worth nothing
        worth = min(worth, settings.lower_lr_ahead_seconds)
    expires = now + worth
    envelope = _envelope(incident, action, incident.plan, settings, now, expires)
    return Deliver(
        kind="webhook",
        key=webhook.request_id(incident.run_uid, incident.attempt, action, number),
        run=incident.run,
        run_uid=incident.run_uid,
        incident=incident.id,
        body=envelope,
        created=now,
        expires_at=expires,
    )


def pin(incident: Incident, target: Target, settings: Settings, time: float) -> Deliver:
    """Return the request to keep the checkpoint that a rollback would go back to.

    One id for each checkpoint of an attempt: several incidents or daemons ask for the same pin once.
    """
    expires = (time if math.isfinite(time) else 0.0) + PIN_SECONDS
    plan = named(
        Plan(
            plan_id="",
            run_uid=incident.run_uid,
            for_attempt=incident.attempt + 1,
            target=target,
            reasons={"target": "Keep this checkpoint while the incident is open."},
        )
    )
    return Deliver(
        kind="webhook",
        key=webhook.request_id(incident.run_uid, incident.attempt, "pin", target.step),
        run=incident.run,
        run_uid=incident.run_uid,
        incident=incident.id,
        body=_envelope(incident, "pin", plan, settings, time, expires),
        created=time if math.isfinite(time) else 0.0,
        expires_at=expires,
    )


def quarantine(incident: Incident, last_good: Target | None, number: int, settings: Settings, time: float) -> Deliver:
    """Return the request to keep the damaged state, as the ``number``-th of the incident's attempt (from 0).

    ``last_good`` is the checkpoint from which the suspect step can be made again.
    """
    began = time if math.isfinite(time) else 0.0
    expires = began + settings.request_ttl
    plan = named(
        Plan(
            plan_id="",
            run_uid=incident.run_uid,
            for_attempt=incident.attempt,
            action="quarantine",
            quarantine=Quarantine(
                incident=incident.id,
                expires_at=iso(expires),
                suspect_step=max(incident.onset, 0),
                last_good=last_good,
            ),
            reasons={"quarantine": "Keep the damaged state, so that the suspect step can be made again."},
        )
    )
    return Deliver(
        kind="webhook",
        key=webhook.request_id(incident.run_uid, incident.attempt, "quarantine", number),
        run=incident.run,
        run_uid=incident.run_uid,
        incident=incident.id,
        body=_envelope(incident, "quarantine", plan, settings, time, expires),
        created=began,
        expires_at=expires,
    )


def _envelope(
    incident: Incident, action: str, plan: Plan, settings: Settings, now: float, expires: float
) -> dict[str, Any]:
    seen = [webhook.Evidence(**one) for one in evidence(incident)]
    address = settings.report_url
    body: dict[str, Any] = msgspec.to_builtins(
        webhook.Envelope(
            type=webhook.TYPE_OF[action],
            timestamp=iso(now),
            data=webhook.Request(
                run_uid=incident.run_uid,
                run=incident.run,
                attempt=incident.attempt,
                incident=incident.id,
                verdict=incident.verdict,
                cause=incident.cause,
                confidence=incident.confidence,
                plan=plan,
                expires_at=iso(expires),
                evidence=seen,
                alerts=[webhook.Alert(**one) for one in encode_numbers(alerts(incident))],
                report_url=None if address is None else address.replace("{id}", incident.id),
            ),
        )
    )
    return body
