"""Incidents of severity info in the log: nobody is told of them, so their lines are written here and not by a notifier.

One line when such an incident is first seen, one when it has ended. What becomes graver is told like any other.
"""

from __future__ import annotations

from typing import Any

import structlog

from trainwarden.rules.notifiers.log import fields_of


class Information:
    """Looks at saved incidents; remembers the open ones of severity info."""

    def __init__(self) -> None:
        self._log = structlog.get_logger("notify")
        self._open: set[str] = set()

    def see(self, row: dict[str, Any]) -> None:
        """Take an incident's row as it is now."""
        key = str(row.get("id"))
        if row.get("severity") != "info":
            self._open.discard(key)
            return
        ended = row.get("closed_step") is not None
        if key not in self._open:
            self._open.add(key)
            self._write("opened", row)
        if ended:
            self._open.discard(key)
            self._write("ended", row)

    def _write(self, event: str, row: dict[str, Any]) -> None:
        self._log.info(
            f"incident {event}",
            run=row.get("run"),
            incident=row.get("id"),
            **fields_of(row),
            summary=row.get("summary", ""),
        )
