"""How far every stream was read, and who reads it: shared by all pullers and the core thread."""

from __future__ import annotations

import threading
from collections.abc import Iterable

from trainwarden.rules.core.inputs import Start
from trainwarden.rules.store import Cursor

#: Seconds after which a silent source loses its stream to another one that serves the same stream.
CLAIM_SECONDS = 30.0


class Positions:
    """Read positions of all streams, ahead of the committed cursors by what lies in the queue."""

    def __init__(self, cursors: Iterable[Cursor] = ()) -> None:
        self._lock = threading.Lock()
        self._seq: dict[tuple[str, int], int] = {}
        self._current: dict[tuple[str, int], Start] = {}
        self._readers: dict[tuple[str, int], tuple[str, float]] = {}
        self._owners: dict[str, str] = {}
        self.rewind(cursors)

    def rewind(self, cursors: Iterable[Cursor]) -> None:
        """Go back to committed cursors (ordered by first reading): what was queued since was thrown away."""
        with self._lock:
            self._seq.clear()
            self._current.clear()
            for cursor in cursors:
                self._seq[cursor.start.start_id, cursor.rank] = cursor.seq
                self._current[cursor.start.run_uid, cursor.rank] = cursor.start

    def seq(self, start_id: str, rank: int) -> int:
        """Return the last ``seq`` that was read of a stream, 0 before the first."""
        with self._lock:
            return self._seq.get((start_id, rank), 0)

    def current(self, run_uid: str, rank: int) -> Start | None:
        """Return the start that is being read of a run's rank."""
        with self._lock:
            return self._current.get((run_uid, rank))

    def of_run(self, run_uid: str) -> dict[int, Start]:
        """Return the start that is being read of each rank of a run; none for a run that was never met."""
        with self._lock:
            return {rank: start for (uid, rank), start in self._current.items() if uid == run_uid}

    def begin(self, start: Start, rank: int) -> None:
        """Go over to another start of the same run's rank."""
        with self._lock:
            self._current[start.run_uid, rank] = start

    def advance(self, start: Start, rank: int, after: int, upto: int) -> None:
        """Note that a stream was read from ``after`` to ``upto``, unless it was rewound meanwhile."""
        with self._lock:
            if self._seq.get((start.start_id, rank), 0) == after:
                self._seq[start.start_id, rank] = upto

    def correct(self, start: Start, rank: int, seq: int) -> None:
        """Go to where the core is: what was put on did not begin there and was thrown away."""
        with self._lock:
            self._seq[start.start_id, rank] = seq

    def claim(self, run_uid: str, rank: int, source: str, now: float, token: str = "") -> bool:
        """Say whether ``source`` may read this run's rank: two readers of one stream would feed it twice.

        The sources of a run share its token (``token`` names its file, "" means none). Whoever serves a run with
        another token, or without, does not get in between: a new attempt or another rank of it would end the judgement
        of the real one. A source with a token goes before one without.
        """
        with self._lock:
            owner = self._owners.get(run_uid, "")
            if owner and owner != token:
                return False
            reader, last = self._readers.get((run_uid, rank), (source, now))
            if reader != source and now - last < CLAIM_SECONDS and owner == token:
                return False
            self._owners[run_uid] = token
            self._readers[run_uid, rank] = (source, now)
            return True

    def leave(self, source: str) -> None:
        """Give up what ``source`` had claimed, so that the next one need not wait."""
        with self._lock:
            for key in [key for key, (reader, _) in self._readers.items() if reader == source]:
                del self._readers[key]
