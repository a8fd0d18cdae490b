"""What the exporter has to say about itself: each fault once in the log, every one counted.

Training must neither stop nor slow down because of the exporter. So whatever goes wrong in here ends here: the first
fault of a kind is logged in one sentence, later ones only raise a number.
"""

from __future__ import annotations

import logging
import threading

log = logging.getLogger("trainwarden.exporter")


class Notices:
    """Says each thing once and counts how often it would have been said."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._count: dict[str, int] = {}
        self._said: list[str] = []

    def say(self, key: str, sentence: str) -> None:
        """Log ``sentence`` unless something was said under ``key`` before; count it in any case."""
        with self._lock:
            self._count[key] = self._count.get(key, 0) + 1
            first = self._count[key] == 1
            if first:
                self._said.append(sentence)
        if first:
            log.warning("trainwarden: %s", sentence)

    def fault(self, where: str, error: BaseException) -> None:
        """Report an exception that was caught at ``where``; the traceback goes to the debug log."""
        self.say(
            where,
            f"{where}: {type(error).__name__}: {error}; training goes on, this part may be missing from its records",
        )
        log.debug("trainwarden: %s", where, exc_info=error)

    def count(self, key: str) -> int:
        """Return how often something happened under ``key``."""
        return self._count.get(key, 0)

    @property
    def said(self) -> list[str]:
        """The sentences said so far, oldest first."""
        with self._lock:
            return list(self._said)
