"""Following log files: any format that replay reads, read on as it grows. Such a run is observed and never acted upon.

A file that is rotated away is read to its end before its successor; one that was truncated or replaced is read from its start.
Reading begins at the first line also after a restart of the daemon: ids and numbers of lines are made of the contents alone, so
what was fed already is known and passed over.
"""

from __future__ import annotations

import os
import time
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import IO

import structlog

from trainwarden.record import Header, RecordError, Step, decode_line
from trainwarden.rules.core.inputs import Happened, Input, SourceSeen, Start, Steps
from trainwarden.rules.replay.attempts import SPACE, Attempts, Placed
from trainwarden.rules.replay.columns import Columns
from trainwarden.rules.replay.readers import HEAD_BYTES, make_reader, read_whole, recognise
from trainwarden.rules.replay.recordings import JOURNAL, is_journal, run_of
from trainwarden.rules.replay.rows import Notices, Reader

from .lines import Counts, Read, decode_lines
from .positions import Positions

#: Bytes that are taken from a file at once, and records in one item of the queue.
PIECE = 1024 * 1024
MOST_RECORDS = 1000
#: Seconds without a new line after which nothing more waits for a next one.
LONG_PAUSE = 60.0
#: Bytes of a file's beginning that tell it from its successor.
_FINGERPRINT = 256
_GZIP = b"\x1f\x8b"


class FollowedFile:
    """One file, read on by :meth:`poll`."""

    def __init__(
        self,
        path: Path,
        positions: Positions,
        put: Callable[[Read], bool],
        counts: Counts,
        *,
        format: str = "auto",
        maps: Mapping[str, str] | None = None,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self.path = path
        self._positions = positions
        self._put = put
        self._counts = counts
        self._wanted = format
        self._maps = dict(maps or {})
        self._clock = clock
        self._run_uid = str(uuid.uuid5(SPACE, str(path.resolve())))
        self._log = structlog.get_logger("source").bind(source=str(path))
        self._said: set[tuple[str, str]] = set()
        self._numbers: dict[str, int] = {}
        self._file: IO[bytes] | None = None
        self._identity = (0, 0)
        self._changed: tuple[int, int, int] | None = None
        self._fingerprint = b""
        self._begin()

    def _begin(self) -> None:
        """Forget all that was read: the next poll begins at the file's first byte."""
        self.close()
        self._notices = Notices()
        self._attempts: Attempts | None = None
        self._stored = self._positions.current(self._run_uid, 0)
        self._sent: tuple[str, int] | None = None
        self._changed = None
        self._begin_file()

    def _begin_file(self) -> None:
        self._format: str | None = None if self._wanted == "auto" else self._wanted
        self._reader: Reader | None = None
        self._journal: tuple[Start, int] | None = None
        self._rest = b""
        self._at = 0
        self._ticks: Iterator[float] = iter(())
        self._caught_up: float | None = None
        self._last_read = self._clock()
        self._fingerprint = b""

    def close(self) -> None:
        """Close the file."""
        if self._file is not None:
            self._file.close()
            self._file = None

    def poll(self) -> bool:
        """Read what is new; False once nothing more is taken."""
        if self._sent is not None and self._positions.seq(self._sent[0], 0) != self._sent[1]:
            self._log.info("reading again from the file's beginning")
            self._begin()
        try:
            return self._poll()
        except OSError as error:
            self._say("unreadable", f"cannot be read: {error.strerror or error}")
            self.close()
            return True

    def _poll(self) -> bool:
        if self._file is None and not self._open():
            return True
        assert self._file is not None
        status = os.fstat(self._file.fileno())
        if self._format is not None and self._format != JOURNAL and read_whole(self._format):
            return self._poll_whole()
        if status.st_size < self._at or (self._fingerprint and not self._same_head()):
            self._log.info("the file was truncated or written anew: it is read from its beginning")
            self._file.seek(0)
            self._begin_file()
        if not self._read_on(status.st_mtime):
            return False
        if self._replaced():
            self._log.info("the file was rotated: its successor is read")
            self.close()
            self._begin_file()
            return self._poll() if self._open() else True
        return True

    def _open(self) -> bool:
        try:
            self._file = self.path.open("rb", buffering=0)
        except FileNotFoundError:
            self._say("absent", "is not there yet")
            return False
        status = os.fstat(self._file.fileno())
        self._identity = (status.st_dev, status.st_ino)
        return True

    def _replaced(self) -> bool:
        try:
            status = self.path.stat()
        except FileNotFoundError:
            return False  # moved away, and its successor is not there yet
        return (status.st_dev, status.st_ino) != self._identity

    def _same_head(self) -> bool:
        assert self._file is not None
        return os.pread(self._file.fileno(), len(self._fingerprint), 0) == self._fingerprint

    def _read_on(self, modified: float) -> bool:
        """Read up to the file's end, piece by piece."""
        assert self._file is not None
        while True:
            piece = self._file.read(PIECE)
            if not piece:
                break
            if len(self._fingerprint) < _FINGERPRINT:
                self._fingerprint = (self._fingerprint + piece)[:_FINGERPRINT]
            self._at += len(piece)
            whole, newline, rest = (self._rest + piece).rpartition(b"\n")
            self._rest = rest
            if newline and not self._take(whole + newline, modified):
                return False
            if self._format is None:
                return True  # more of it has to come before its format is known
        return self._idle()

    def _idle(self) -> bool:
        if self._attempts is None:
            return True
        pause = self._clock() - self._last_read
        self._ticks = iter((self._clock(),))
        return self._send(self._attempts.idle(long=pause >= LONG_PAUSE))

    def _take(self, lines: bytes, modified: float) -> bool:
        """Take whole lines."""
        if self._format is None:
            self._format = self._recognise(lines)
            if self._format is None:
                keep = lines if len(lines) <= HEAD_BYTES else lines[-HEAD_BYTES // 2 :].partition(b"\n")[2]
                self._rest = keep + self._rest
                return True
        if self._format == JOURNAL:
            return self._take_journal(lines)
        if self._reader is None:
            self._reader = make_reader(self._format, self._notices)
        self._spread(lines, modified)
        return self._send(self._feed(lines.splitlines(keepends=True)))

    def _feed(self, lines: Iterable[bytes]) -> Iterator[Placed]:
        assert self._reader is not None
        if self._attempts is None:
            self._attempts = self._new_attempts()
        yield from self._attempts.feed(self._reader.read(lines))

    def _new_attempts(self) -> Attempts:
        columns = Columns(self._maps, self._notices)
        return Attempts(
            self._run_uid, run_of(self.path), columns, self._notices, attempt_of=self._attempt_of, clock=self._tick
        )

    def _attempt_of(self, start_id: str, attempt: int) -> int:
        """Number the starts on from what the database remembers of this log."""
        stored = self._stored
        if start_id not in self._numbers:
            if stored is not None:
                attempt = stored.attempt if start_id == stored.start_id else max(attempt, stored.attempt + 1)
            self._numbers[start_id] = attempt
        return self._numbers[start_id]

    def _spread(self, lines: bytes, modified: float) -> None:
        """Lay the lines that bring no time of their own between the last ones and now; a backlog ends when the file was written."""
        assert self._file is not None
        count = max(1, lines.count(b"\n"))
        now, size = self._clock(), os.fstat(self._file.fileno()).st_size
        if self._caught_up is None:
            end = min(now, modified) - max(0, size - self._at) * count / len(lines)
            begin = end - count
        else:
            begin, end = self._caught_up, now
        if self._at >= size:
            self._caught_up = now
        self._last_read = now
        self._ticks = (begin + (end - begin) * n / count for n in range(1, count + 1))

    def _tick(self) -> float:
        return next(self._ticks, None) or self._clock()

    def _recognise(self, lines: bytes) -> str | None:
        if lines.startswith(_GZIP):
            self._say("packed", "is packed with gzip: a packed file does not grow; use `trainwarden replay`")
            return None
        if is_journal(lines.partition(b"\n")[0]):
            return JOURNAL
        found = recognise(lines, self.path.name)
        if found is None and len(lines) > HEAD_BYTES:
            self._say("unknown", "is no log that is known; --format names its format")
        return found

    def _poll_whole(self) -> bool:
        """Read a file that is replaced rather than appended to, where it has changed."""
        status = self.path.stat()
        changed = (status.st_ino, status.st_size, status.st_mtime_ns)
        if changed == self._changed:
            return True
        self._changed = changed
        data = self.path.read_bytes()
        self._reader = make_reader(self._format or "", self._notices)
        self._attempts = self._new_attempts()
        self._ticks = iter(())
        return self._send(self._feed([data])) and self._send(self._attempts.end())

    def _take_journal(self, lines: bytes) -> bool:
        if self._journal is None:
            first, _, lines = lines.partition(b"\n")
            try:
                header = decode_line(first)
            except RecordError as error:
                self._say("journal", f"its header cannot be read: {error}")
                return True
            if not isinstance(header, Header):
                self._say("journal", "is a journal without its header")
                return True
            self._journal = (Start(header.run_uid, header.run, header.attempt, header.start_id), header.rank)
        start, rank = self._journal
        if not self._positions.claim(start.run_uid, rank, str(self.path), self._clock()):
            self._say("taken", "is read from its exporter already")
            return True
        after = self._positions.seq(start.start_id, rank)
        page = decode_lines(start, rank, lines, after)
        if page.malformed:
            self._counts.malformed(page.malformed)
        if page.upto == after:
            return True
        return self._put_read(start, rank, after, page.upto, page.inputs)

    def _send(self, lines: Iterable[Placed]) -> bool:
        """Put lines on the queue that were not fed yet, those of one start and of a limited number together."""
        inputs: list[Input] = []
        steps: list[Step] = []
        current: Start | None = None
        after = upto = 0

        def flush() -> bool:
            if steps and current is not None:
                inputs.append(Steps(current, 0, tuple(steps)))
                steps.clear()
            if current is None or upto == after:
                return True
            done = self._put_read(current, 0, after, upto, tuple(inputs))
            inputs.clear()
            return done

        for start, _, item in lines:
            if start != current or upto - after >= MOST_RECORDS:
                if not flush():
                    return False
                current = start
                after = upto = self._positions.seq(start.start_id, 0)
                self._sent = (start.start_id, after)
            if item.seq <= upto:
                continue
            upto = item.seq
            if isinstance(item, Step):
                steps.append(item)
            else:
                if steps:
                    inputs.append(Steps(start, 0, tuple(steps)))
                    steps.clear()
                inputs.append(Happened(start, 0, item))
        done = flush()
        for row in self._notices.rows():
            self._say(f"{row['kind']} {row['signal']}", row["says"], key_only=True)
        return done

    def _put_read(self, start: Start, rank: int, after: int, upto: int, inputs: tuple[Input, ...]) -> bool:
        before = self._positions.current(start.run_uid, rank)
        if before is None or before.start_id != start.start_id:
            self._positions.begin(start, rank)
        seen = SourceSeen(start, rank, self._clock(), upto, True, authenticated=False, may_act=False)
        if not self._put(Read(start, rank, after, upto, (*inputs, seen))):
            return False
        self._positions.advance(start, rank, after, upto)
        if start.run_uid == self._run_uid:
            self._sent = (start.start_id, upto)
        return True

    def _say(self, key: str, says: str, *, key_only: bool = False) -> None:
        """Say a thing once."""
        known = (key, "" if key_only else says)
        if known not in self._said:
            self._said.add(known)
            self._log.warning(says)
