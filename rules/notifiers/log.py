"""The log: every message becomes one line of the daemon's own log. Always configured, never fails."""

from __future__ import annotations

from typing import Any

import msgspec
import structlog

from trainwarden.rules.notifiers import Answer
from trainwarden.rules.outbox import Row

_LONGEST = 500


class LogNotifier:
    """Writes the message's top-level texts and numbers as fields of one line."""

    integration = "log"

    def __init__(self) -> None:
        self._log = structlog.get_logger("notify")

    def deliver(self, row: Row, now: float) -> Answer:
        """Log the message."""
        body: Any = msgspec.json.decode(row.body)
        fields = body if isinstance(body, dict) else {"body": body}
        plain = {
            key: value[:_LONGEST] if isinstance(value, str) else value
            for key, value in fields.items()
            if isinstance(value, str | int | float | bool) and key not in ("event", "level", "timestamp", "logger")
        }
        plain.update(run=row.run, incident=row.incident)
        says = plain.pop("summary", None) or plain.pop("says", None) or "incident"
        severity = str(plain.get("severity", "info"))
        level = {"critical": self._log.error, "warning": self._log.warning}.get(severity, self._log.info)
        level(str(says), **plain)
        return Answer()
