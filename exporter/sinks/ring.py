"""The last records in memory: a fixed number of encoded lines that the HTTP threads read."""

from __future__ import annotations

import threading
from collections import deque
from itertools import islice


class Ring:
    """Keeps the newest ``capacity`` lines with their sequence numbers, which ascend without holes."""

    def __init__(self, capacity: int = 4096) -> None:
        self._lines: deque[tuple[int, bytes]] = deque(maxlen=capacity)
        self._lock = threading.Lock()

    def append(self, seq: int, line: bytes) -> None:
        """Add a line (without a newline); the oldest gives way."""
        with self._lock:
            self._lines.append((seq, line))

    @property
    def first(self) -> int:
        """Sequence number of the oldest line kept, 0 where there is none."""
        with self._lock:
            return self._lines[0][0] if self._lines else 0

    @property
    def last(self) -> int:
        """Sequence number of the newest line, 0 where there is none."""
        with self._lock:
            return self._lines[-1][0] if self._lines else 0

    def after(self, seq: int, limit: int) -> list[tuple[int, bytes]] | None:
        """Return at most ``limit`` lines beyond ``seq``, or None where the next one is no longer kept."""
        with self._lock:
            if not self._lines or seq >= self._lines[-1][0]:
                return []
            skip = seq + 1 - self._lines[0][0]
            if skip < 0:
                return None
            return list(islice(self._lines, skip, skip + limit))
