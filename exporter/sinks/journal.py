"""The records on disk: append-only newline-delimited JSON, one folder per start and rank, rotated by size.

Each record is handed to the kernel as soon as it is made. A full or failing disk stops nothing: the lines wait in bounded
memory while the disk is tried again, what does not fit any more is counted as lost, and a file never holds a torn line in
its middle.
"""

from __future__ import annotations

import os
import time
from collections import deque
from collections.abc import Iterator
from pathlib import Path

import msgspec

from trainwarden.exporter.notices import Notices
from trainwarden.record import Header, encode_line

#: Lines that wait in memory while the disk does not take them.
BACKLOG = 4096
#: Seconds after which a disk that failed is tried again.
RETRY_SECONDS = 5.0


class Journal:
    """Writes one start's lines of one rank into ``folder``. Used by the drain thread alone."""

    def __init__(self, folder: Path, header: Header, notices: Notices, rotate_bytes: int) -> None:
        self._folder = folder
        self._head = encode_line(header) + b"\n"
        self._notices = notices
        self._rotate = rotate_bytes
        self._file = -1
        self._number = 0
        self._size = 0
        self._waiting: deque[bytes] = deque()
        self._retry_at = 0.0
        #: Records that were lost because the disk took none for too long.
        self.lost = 0

    def append(self, line: bytes) -> None:
        """Add a line (without a newline) to those that :meth:`flush` writes."""
        if len(self._waiting) >= BACKLOG:
            self._waiting.popleft()
            self.lost += 1
        self._waiting.append(line + b"\n")

    def flush(self) -> None:
        """Write what waits. On an error say so once, keep the lines, and leave the disk alone for a few seconds."""
        if not self._waiting or time.monotonic() < self._retry_at:
            return
        try:
            while self._waiting:
                self._write()
        except OSError as error:
            self._retry_at = time.monotonic() + RETRY_SECONDS
            self._notices.fault(f"journal in {self._folder}", error)
            self._end_file(failed=True)

    def _write(self) -> None:
        full = self._size > len(self._head) and self._size + len(self._waiting[0]) > self._rotate
        if self._file < 0 or full:
            self._next_file()
        batch: list[bytes] = []
        length = 0
        for line in self._waiting:
            if batch and self._size + length + len(line) > self._rotate:
                break
            batch.append(line)
            length += len(line)
        self._put(b"".join(batch))
        for _ in batch:
            self._waiting.popleft()

    def _next_file(self) -> None:
        self._end_file()
        self._folder.mkdir(parents=True, exist_ok=True)
        path = self._folder / f"{self._number + 1:05d}.ndjson"
        self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        self._number += 1
        self._size = os.fstat(self._file).st_size
        self._put(self._head)

    def _put(self, data: bytes) -> None:
        """Append all of ``data`` or, where that fails, none of it."""
        view = memoryview(data)
        try:
            while view:
                view = view[os.write(self._file, view) :]
        except OSError:
            try:
                os.ftruncate(self._file, self._size)
            except OSError:
                self._notices.say(
                    "torn journal", f"{self._folder}: the last line of a file is torn; readers leave it out"
                )
            raise
        self._size += len(data)

    def _end_file(self, failed: bool = False) -> None:
        if self._file < 0:
            return
        if failed and self._size == 0:  # not even its header: leave no empty file behind
            (self._folder / f"{self._number:05d}.ndjson").unlink(missing_ok=True)
            self._number -= 1
        os.close(self._file)
        self._file = -1

    def close(self) -> None:
        """Write what waits, once more and whatever happened before, and close the file."""
        self._retry_at = 0.0
        self.flush()
        self.lost += len(self._waiting)
        self._waiting.clear()
        self._end_file()


class _Mark(msgspec.Struct):
    """The fields of a line by which it is found; the rest is left undecoded."""

    type: str = ""
    seq: int = 0
    step: int | None = None
    samples_seen: float | None = None
    tokens: float | None = None
    epoch: float | None = None
    sample_position: float | None = None


_marks = msgspec.json.Decoder(_Mark)


def _lines(path: Path) -> Iterator[tuple[_Mark, bytes]]:
    """Yield the whole lines of a journal file but its header; what cannot be read ends the file."""
    with path.open("rb") as file:
        for line in file:
            if not line.endswith(b"\n"):
                return
            try:
                mark = _marks.decode(line)
            except msgspec.DecodeError:
                continue
            if mark.type:
                yield mark, line.rstrip(b"\n")


def read_after(folder: Path, after: int, limit: int) -> list[tuple[int, bytes]]:
    """Return at most ``limit`` lines of a start's journal folder whose sequence number lies beyond ``after``."""
    found: list[tuple[int, bytes]] = []
    files = sorted(folder.glob("*.ndjson"))
    starts = [next((mark.seq for mark, _ in _lines(path)), 0) for path in files]
    for number, path in enumerate(files):
        if number + 1 < len(files) and 0 < starts[number + 1] <= after + 1:
            continue  # the next file begins early enough
        for mark, line in _lines(path):
            if mark.seq > after:
                found.append((mark.seq, line))
                if len(found) >= limit:
                    return found
    return found


def first_seq(folder: Path) -> int:
    """Return the first sequence number of a start's journal folder, 0 where it holds nothing."""
    return next((mark.seq for path in sorted(folder.glob("*.ndjson")) for mark, _ in _lines(path)), 0)


def bounds(folder: Path) -> tuple[int, int]:
    """Return the first and last sequence number of a start's journal folder, (0, 0) where it holds nothing."""
    for path in sorted(folder.glob("*.ndjson"), reverse=True):
        last = 0
        for mark, _ in _lines(path):
            last = mark.seq
        if last:
            return first_seq(folder), last
    return 0, 0


def totals_at(files: list[Path], step: int) -> tuple[float, float] | None:
    """Return (samples, tokens) trained on up to ``step`` as the newest record of that step has them, or None.

    ``files`` are journal files, newest first.
    """
    mark = _newest(files, step)
    return None if mark is None else (mark.samples_seen or 0.0, mark.tokens or 0.0)


def position_at(files: list[Path], step: int) -> tuple[int, int] | None:
    """Return (epoch, position in its order) behind ``step`` as the newest record of that step has them, or None.

    ``files`` are journal files, newest first.
    """
    mark = _newest(files, step)
    if mark is None or mark.sample_position is None:
        return None
    return int(mark.epoch or 0), int(mark.sample_position)


def _newest(files: list[Path], step: int) -> _Mark | None:
    """Return what the newest record of a step says, None where no file that can be read has one."""
    for path in files:
        try:
            found = None
            for mark, _ in _lines(path):
                if mark.type == "step" and mark.step == step:
                    found = mark
            if found is not None:
                return found
        except OSError:
            continue
    return None
