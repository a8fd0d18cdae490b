"""Finding and reading journals: files, globs, run folders, gzip and standard input, merged into one order of time.

All files of one run are one recording, whatever way they were named. Each rank of each start is a stream whose own order is
kept; between streams, time decides.
"""

from __future__ import annotations

import glob
import gzip
import heapq
import math
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import IO, TypeAlias

import msgspec

from trainwarden.record import Event, Header, RecordError, Step, decode_line
from trainwarden.rules.core.inputs import Start
from trainwarden.rules.sources.lines import check

#: A line with the stream that it belongs to.
Placed: TypeAlias = tuple[Start, int, "Step | Event"]


class ReplayError(ValueError):
    """A recording that cannot be read. The message names file, line and field and says what to do."""


class Stream(msgspec.Struct):
    """One rank of one start, with its files in order."""

    start: Start
    rank: int
    files: list[Path] = []


class Recording(msgspec.Struct):
    """All streams of one run. ``source`` says what was asked for: the one file or folder, or the first of several."""

    source: str
    run: str
    run_uid: str
    streams: list[Stream] = []


def find_recordings(names: Iterable[str], standard_input: IO[bytes], spool: Path) -> list[Recording]:
    """Return the recordings that files, globs, folders and ``-`` (standard input) name, in the order of their naming.

    Standard input is split at its headers into files in ``spool``, an empty folder that the caller removes.

    Raises:
        ReplayError: a name matches nothing, or a file is no journal.
    """
    recordings: dict[str, Recording] = {}
    sources: dict[str, list[str]] = {}
    for name in names:
        for path in _split(standard_input, spool) if name == "-" else _files_of(name):
            header = read_header(path)
            recording = recordings.setdefault(header.run_uid, Recording(name, header.run, header.run_uid))
            named = sources.setdefault(header.run_uid, [])
            if name not in named:
                named.append(name)
            _add(recording, header, path)
    for run_uid, recording in recordings.items():
        more = len(sources[run_uid]) - 1
        recording.source = sources[run_uid][0] + (f" and {more} more" if more else "")
        for stream in recording.streams:
            stream.files.sort(key=lambda path: (path.name.removesuffix(".gz"), str(path)))
        recording.streams.sort(key=lambda stream: (stream.start.attempt, stream.start.start_id, stream.rank))
    return list(recordings.values())


def _add(recording: Recording, header: Header, path: Path) -> None:
    for stream in recording.streams:
        if stream.start.start_id == header.start_id and stream.rank == header.rank:
            if path not in stream.files:
                stream.files.append(path)
            return
    start = Start(header.run_uid, header.run, header.attempt, header.start_id)
    recording.streams.append(Stream(start, header.rank, [path]))


def _files_of(name: str) -> list[Path]:
    path = Path(name)
    if path.is_dir():
        found = sorted(item for pattern in ("*.ndjson", "*.ndjson.gz") for item in path.rglob(pattern))
        if not found:
            raise ReplayError(f"{name}: no journal (*.ndjson) in this folder")
        return found
    if path.exists():
        return [path]
    matched = [Path(item) for item in sorted(glob.glob(name, recursive=True))]  # noqa: PTH207 (a user's own pattern)
    if not matched:
        raise ReplayError(f"{name}: no such file")
    return [item for one in matched for item in _files_of(str(one))]


def _split(standard_input: IO[bytes], folder: Path) -> list[Path]:
    files: list[Path] = []
    opened: IO[bytes] | None = None
    try:
        for line in standard_input:
            if _is_header(line) or opened is None:
                if opened is not None:
                    opened.close()
                files.append(folder / f"{len(files) + 1:05}.ndjson")
                opened = files[-1].open("wb")
            opened.write(line)
    finally:
        if opened is not None:
            opened.close()
    if not files:
        raise ReplayError("-: standard input is empty")
    return files


def _is_header(line: bytes) -> bool:
    if b'"schema"' not in line:
        return False
    try:
        return isinstance(decode_line(line), Header)
    except RecordError:
        return False


def _open(path: Path) -> IO[bytes]:
    opened = path.open("rb")
    magic = opened.read(2)
    opened.seek(0)
    if magic == b"\x1f\x8b":
        opened.close()
        return gzip.open(path, "rb")  # type: ignore[return-value]
    return opened


def read_header(path: Path) -> Header:
    """Return line one of a journal.

    Raises:
        ReplayError: the file cannot be read, or is no journal.
    """
    try:
        with _open(path) as file:
            line = file.readline(1_000_000)
    except (OSError, EOFError) as error:
        raise ReplayError(f"{path}: cannot be read: {error}") from None
    try:
        header = decode_line(line)
    except RecordError as error:
        raise ReplayError(f"{path}:1: {error}; a journal begins with a header line") from None
    if not isinstance(header, Header):
        raise ReplayError(f"{path}:1: no header: a journal begins with one (an exporter writes it), this file does not")
    return header


def read_stream(stream: Stream) -> Iterator[Placed]:
    """Yield a stream's lines in order, each once. A torn last line of a file ends that file without an error.

    Raises:
        ReplayError: a line that is whole is no record.
    """
    seq = 0
    for path in stream.files:
        for number, line in enumerate(_lines(path), start=1):
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
                raise ReplayError(f"{path}:{number}: {error}") from None
            if item.seq > seq:
                seq = item.seq
                yield stream.start, stream.rank, item


def _lines(path: Path) -> Iterator[bytes]:
    try:
        with _open(path) as file:
            yield from file
    except EOFError:
        return  # a gzip that was cut off: what came before is whole
    except OSError as error:
        raise ReplayError(f"{path}: cannot be read: {error}") from None


def merged(recording: Recording) -> Iterator[Placed]:
    """Yield all lines of a recording by time; a clock that went back does not change a stream's own order."""

    def keyed(stream: Stream, turn: int) -> Iterator[tuple[float, int, int, Placed]]:
        newest = -math.inf
        for count, placed in enumerate(read_stream(stream)):
            newest = max(newest, placed[2].time)
            yield newest, turn, count, placed

    streams = (keyed(stream, turn) for turn, stream in enumerate(recording.streams))
    for _, _, _, placed in heapq.merge(*streams, key=lambda item: item[:3]):
        yield placed
