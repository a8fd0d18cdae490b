"""What the exporter has to say about itself: each fault once in the log, every one counted.

Training must neither stop nor slow down because of the exporter. So whatever goes wrong in here ends here: the first
fault of a kind is logged in one sentence, later ones only raise a number. Saying takes no lock and writes nothing while a drain
thread is there that does it a moment later: a handler of the log may wait for a full pipe, a disk, or another thread.
"""

from __future__ import annotations

import logging
from collections import deque
from itertools import count

log = logging.getLogger("trainwarden.exporter")


class Notices:
    """Says each thing once and counts how often it would have been said. Safe from any thread and from a signal handler."""

    def __init__(self) -> None:
        self._count: dict[str, count[int]] = {}
        self._said: deque[str] = deque()
        self._unwritten: deque[tuple[int, str, BaseException | None]] = deque()
        #: Whether somebody calls :meth:`write` soon; until then and after, what is said is written at once.
        self.deferred = False

    def say(self, key: str, sentence: str) -> None:
        """Log ``sentence`` unless something was said under ``key`` before; count it in any case."""
        if next(self._count.setdefault(key, count())) == 0:  # each of these is one step of the interpreter
            self._said.append(sentence)
            self._log(logging.WARNING, sentence)

    def fault(self, where: str, error: BaseException) -> None:
        """Report an exception that was caught at ``where``; the traceback goes to the debug log."""
        self.say(
            where,
            f"{where}: {type(error).__name__}: {error}; training goes on, this part may be missing from its records",
        )
        self._log(logging.DEBUG, where, error)

    def _log(self, level: int, sentence: str, error: BaseException | None = None) -> None:
        self._unwritten.append((level, sentence, error))
        if not self.deferred:
            self.write()

    def write(self) -> None:
        """Write to the log what was said since the last time."""
        while self._unwritten:
            try:
                level, sentence, error = self._unwritten.popleft()
            except IndexError:  # another thread wrote it
                return
            log.log(level, "trainwarden: %s", sentence, exc_info=error)

    def count(self, key: str) -> int:
        """Return how often something happened under ``key``."""
        found = self._count.get(key)
        return 0 if found is None else int(found.__reduce__()[1][0])

    @property
    def said(self) -> list[str]:
        """The sentences said so far, oldest first."""
        return list(self._said)
