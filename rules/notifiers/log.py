"""The log: every message becomes one line of the daemon's own log. Always configured, never fails."""

from __future__ import annotations

from typing import Any

import msgspec
import structlog

from trainwarden.rules.notifiers import Answer
from trainwarden.rules.outbox import Row

#: Fields of an incident that make the line; the rest is in the API and the report.
FIELDS = ("state", "severity", "verdict", "action", "held_by", "attempt", "onset_step")


def fields_of(incident: dict[str, Any]) -> dict[str, Any]:
    """Return the fields of an incident's row that make a line of the log."""
    fields = {name: incident[name] for name in FIELDS if incident.get(name) is not None}
    if isinstance(incident.get("cause"), dict):
        fields["cause"] = incident["cause"].get("name")
    return fields


class LogNotifier:
    """Writes what happened to an incident as one line; its level follows the severity."""

    integration = "log"

    def __init__(self) -> None:
        self._log = structlog.get_logger("notify")

    def deliver(self, row: Row, now: float) -> Answer:
        """Log the message."""
        body: dict[str, Any] = msgspec.json.decode(row.body, type=dict[str, Any])
        incident = body.get("incident")
        facts: dict[str, Any] = incident if isinstance(incident, dict) else {}
        severity = facts.get("severity")
        level = {"critical": self._log.error, "warning": self._log.warning}.get(str(severity), self._log.info)
        level(
            f"incident {body.get('event', '')}".rstrip(),
            run=row.run,
            incident=row.incident,
            **fields_of(facts),
            summary=facts.get("summary", ""),
        )
        return Answer()
