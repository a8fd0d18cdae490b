"""The log: every message becomes one line of the daemon's own log. Always configured, never fails."""

from __future__ import annotations

from typing import Any

import msgspec
import structlog

from trainwarden.rules.notifiers import Answer
from trainwarden.rules.outbox import Row

#: Fields of an incident that make the line; the rest is in the API and the report.
FIELDS = ("state", "severity", "verdict", "action", "held_by", "attempt", "onset_step")


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
        fields = {name: facts[name] for name in FIELDS if facts.get(name) is not None}
        if isinstance(facts.get("cause"), dict):
            fields["cause"] = facts["cause"].get("name")
        severity = facts.get("severity")
        level = {"critical": self._log.error, "warning": self._log.warning}.get(str(severity), self._log.info)
        level(
            f"incident {body.get('event', '')}".rstrip(),
            run=row.run,
            incident=row.incident,
            **fields,
            summary=facts.get("summary", ""),
        )
        return Answer()
