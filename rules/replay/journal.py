"""Journals: which streams of which runs they hold, and their lines merged into one order of time.

All files of one run are one recording, whatever way they were named. Each rank of each start is a stream whose own order is
kept; between streams, time decides.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec

from trainwarden.record import Header, RecordError, decode_line
from trainwarden.rules.core.inputs import Start
from trainwarden.rules.sources.lines import check

from .attempts import Placed
from .files import ReplayError, ignore, is_packed, read_lines


class Stream(msgspec.Struct):
    """One rank of one start, with its files in order."""

    start: Start
    rank: int
    files: list[Path] = []


def add_file(streams: list[Stream], header: Header, path: Path) -> None:
    """Put a journal file with its stream."""
    for stream in streams:
        if stream.start.start_id == header.start_id and stream.rank == header.rank:
            if path not in stream.files:
                stream.files.append(path)
            return
    start = Start(header.run_uid, header.run, header.attempt, header.start_id)
    streams.append(Stream(start, header.rank, [path]))


def put_in_order(streams: list[Stream]) -> None:
    """Order streams by attempt and rank, and the files of each by name."""
    for stream in streams:
        stream.files.sort(key=lambda path: (path.name.removesuffix(".gz"), str(path)))
    streams.sort(key=lambda stream: (stream.start.attempt, stream.start.start_id, stream.rank))


def read_header(path: Path) -> Header:
    """Return line one of a journal.

    Raises:
        ReplayError: the file cannot be read, or is no journal.
    """
    line = next(read_lines(path), b"")
    try:
        header = decode_line(line)
    except RecordError as error:
        raise ReplayError(f"{path}:1: {error}; a journal begins with a header line") from None
    if not isinstance(header, Header):
        raise ReplayError(f"{path}:1: no header: a journal begins with one (an exporter writes it), this file does not")
    return header


def read_stream(
    stream: Stream, told: Callable[[int], None] = ignore, damaged: Callable[[Path, str], None] = lambda path, what: None
) -> Iterator[Placed]:
    """Yield a stream's lines in order, each once. A torn last line of a file ends that file without an error.

    ``damaged`` is called with a file that is a damaged gzip and what is wrong with it; lines in it that are no records are left out.

    Raises:
        ReplayError: a line that is whole is no record.
    """
    seq = 0
    for path in stream.files:
        faults: list[str] = []
        wrong: ReplayError | None = None
        packed = is_packed(path)
        for number, line in enumerate(read_lines(path, told, faults.append), start=1):
            if not line.strip():
                continue
            try:
                item = decode_line(line)
                if isinstance(item, Header):
                    if number > 1:
                        raise ReplayError(
                            f"{path}:{number}: a second header: pipe the file into `replay -` to split it"
                        )
                    continue
                check(item)
            except RecordError as error:
                if not line.endswith(b"\n"):
                    break
                wrong = wrong or ReplayError(f"{path}:{number}: {error}")
                if not packed:
                    raise wrong from None
                continue  # whether the gzip is damaged is known at its end
            if item.seq > seq:
                seq = item.seq
                yield stream.start, stream.rank, item
        if faults:
            damaged(path, faults[0])
        elif wrong is not None:
            raise wrong


def merged_streams(
    streams: list[Stream],
    told: Callable[[int], None] = ignore,
    damaged: Callable[[Path, str], None] = lambda path, what: None,
) -> Iterator[Placed]:
    """Yield all lines of a run's streams by time; a clock that went back does not change a stream's own order."""
    if len(streams) == 1:
        yield from read_stream(streams[0], told, damaged)
        return

    def keyed(stream: Stream, turn: int) -> Iterator[tuple[float, int, int, Placed]]:
        newest = -math.inf
        for count, placed in enumerate(read_stream(stream, told, damaged)):
            newest = max(newest, placed[2].time)
            yield newest, turn, count, placed

    ordered = (keyed(stream, turn) for turn, stream in enumerate(streams))
    for _, _, _, placed in heapq.merge(*ordered, key=lambda item: item[:3]):
        yield placed
