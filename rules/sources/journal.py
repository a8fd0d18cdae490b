"""What a run wrote that no exporter serves any more, read from the journals in its folder.

Where the daemon shares the run's folder, nothing of a run is lost that ended, or ended and began again, while nobody asked
it: the rest of every stream that is known, and the starts after it, are read in their order. Only runs that were met
before are read: a folder full of old runs is no news. What is read here is over, so it says of itself that it is catching
up and proved by nobody: nothing is ever acted on because of it.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec
import structlog

from trainwarden.record import Header, RecordError, decode_line
from trainwarden.rules.core.inputs import SourceSeen, Start
from trainwarden.rules.sources.lines import Counts, Read, decode_lines
from trainwarden.rules.sources.positions import Positions
from trainwarden.runfolder import RunFolder, RunFolderError

#: Bytes that are read at once of one stream before it is the next rank's turn.
_PIECE = 256 * 1024
#: Bytes at the end of a file in which its last whole line is looked for; a line is much shorter.
_TAIL = 64 * 1024


class Stream(msgspec.Struct, frozen=True):
    """One rank of one start as it lies on the disk: its files in order, and the number of its last line."""

    start: Start
    rank: int
    files: tuple[Path, ...]
    last: int


class _Stopping(Exception):
    """The daemon takes no more, or the stream is somewhere else now: the rest is for another time."""


class Journals:
    """Reads what lies behind the cursors in the folder of one run."""

    def __init__(
        self,
        run_folder: Path,
        token_file: Path,
        positions: Positions,
        put: Callable[[Read], bool],
        counts: Counts,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._run_folder = run_folder
        self._name = f"journals of {run_folder}"
        self._token = str(token_file.resolve()) if token_file.is_file() else ""
        self._positions = positions
        self._put = put
        self._counts = counts
        self._clock = clock
        self._tried: dict[tuple[str, int], int] = {}
        self._log = structlog.get_logger("source").bind(folder=str(run_folder))

    def unread(self, live: frozenset[int] | None) -> list[list[Stream]]:
        """Return the streams with lines that were not read yet, by start in order.

        ``live`` are the ranks that an exporter serves, None where that is not known yet: their newest start is the
        exporter's.
        """
        starts = self._starts()
        found = []
        for place, streams in enumerate(starts):
            if place == len(starts) - 1:
                streams = [] if live is None else [one for one in streams if one.rank not in live]
            rest = [
                one
                for one in streams
                if one.last > self._positions.seq(one.start.start_id, one.rank)
                and self._tried.get((one.start.start_id, one.rank), 0) < one.last
            ]
            if rest:
                found.append(rest)
        return found

    def read(self, starts: list[list[Stream]]) -> None:
        """Put on the lines of these starts, one start after the other, the ranks of each in turns."""
        try:
            for streams in starts:
                claimed = [one for one in streams if self._claim(one)]
                self._read_start(claimed)
                if len(claimed) < len(streams):
                    break  # somebody reads them yet: what comes after them must wait
        except _Stopping:
            pass
        finally:
            self._positions.leave(self._name)

    def _starts(self) -> list[list[Stream]]:
        """Return the streams of the starts that are being read, or come after those, by start in order."""
        files: dict[tuple[str, str], dict[int, list[Path]]] = {}
        try:
            for path in RunFolder(self._run_folder.name, self._run_folder.parent).journal_files():
                rank, start_id, attempt = path.parent.name, path.parent.parent.name, path.parent.parent.parent.name
                files.setdefault((attempt, start_id), {}).setdefault(int(rank[5:]), []).append(path)
        except (OSError, RunFolderError):
            return []
        starts: list[list[Stream]] = []
        known: dict[int, Start] = {}
        for (attempt, start_id), ranks in reversed(files.items()):
            header = next((found for paths in ranks.values() if (found := _header(paths[0]))), None)
            if header is None or header.start_id != start_id or f"attempt-{header.attempt}" != attempt:
                continue
            known = known or self._positions.of_run(header.run_uid)
            if not known or header.attempt < min(one.attempt for one in known.values()):
                break  # never met, or over before what is being read
            start = Start(header.run_uid, header.run, header.attempt, start_id)
            starts.insert(
                0, [Stream(start, rank, tuple(paths), _last_seq(paths)) for rank, paths in sorted(ranks.items())]
            )
            if {one.start_id for one in known.values()} <= {one[0].start.start_id for one in starts}:
                break
        return _not_before(starts, known)

    def _claim(self, stream: Stream) -> bool:
        return self._positions.claim(stream.start.run_uid, stream.rank, self._name, self._clock(), self._token)

    def _read_start(self, streams: list[Stream]) -> None:
        before = {one.rank: self._positions.seq(one.start.start_id, one.rank) for one in streams}
        for one in streams:
            current = self._positions.current(one.start.run_uid, one.rank)
            if current is None or current.start_id != one.start.start_id:
                self._positions.begin(one.start, one.rank)
            self._note(one, reachable=True)  # the core waits for a rank that is catching up
        turns = {one.rank: self._pieces(one) for one in streams}
        while turns:
            for one in streams:
                if one.rank in turns and not next(turns[one.rank], False):
                    del turns[one.rank]
        for one in streams:
            self._note(one, reachable=False)
            upto = self._positions.seq(one.start.start_id, one.rank)
            if upto > before[one.rank]:
                self._log.info(
                    "the end of a start was read from its journal",
                    run=one.start.run,
                    attempt=one.start.attempt,
                    rank=one.rank,
                    lines=upto - before[one.rank],
                )

    def _pieces(self, stream: Stream) -> Iterator[bool]:
        """Put on a stream piece by piece."""
        start, rank = stream.start, stream.rank
        at = self._positions.seq(start.start_id, rank)
        for path in stream.files:
            if (_last_seq([path]) or at + 1) <= at:
                continue
            try:
                with path.open("rb") as file:
                    while piece := file.read(_PIECE) + file.readline(_PIECE):
                        page = decode_lines(start, rank, piece, at)
                        if not self._claim(stream) or self._positions.seq(start.start_id, rank) != at:
                            raise _Stopping  # somebody else reads it, or the driver went back
                        if page.upto == at:
                            continue
                        self._counts.malformed(page.malformed)
                        self._counts.missing(page.missing)
                        if not self._put(Read(start, rank, at, page.upto, page.inputs)):
                            raise _Stopping
                        self._positions.advance(start, rank, at, page.upto)
                        at = page.upto
                        yield True
            except OSError as error:
                self._log.warning("a journal cannot be read", file=str(path), error=error.strerror)
        self._tried[start.start_id, rank] = stream.last

    def _note(self, stream: Stream, *, reachable: bool) -> None:
        at = self._positions.seq(stream.start.start_id, stream.rank)
        seen = SourceSeen(
            start=stream.start,
            rank=stream.rank,
            time=self._clock(),
            last_seq=stream.last,
            caught_up=False,
            authenticated=False,
            may_act=False,
            reachable=reachable,
        )
        if not self._put(Read(stream.start, stream.rank, at, at, (seen,))):
            raise _Stopping


def _not_before(starts: list[list[Stream]], known: dict[int, Start]) -> list[list[Stream]]:
    """Leave out of each rank what lies before the start that is being read of it: going back would end that one."""
    places = {streams[0].start.start_id: place for place, streams in enumerate(starts)}
    newest = max((one.attempt for one in known.values()), default=0)
    first = min((places[one.start_id] for one in known.values() if one.start_id in places), default=None)

    def wanted(stream: Stream, place: int) -> bool:
        current = known.get(stream.rank)
        if current is not None and current.start_id in places:
            return place >= places[current.start_id]
        if first is not None and current is None:
            return place >= first
        return stream.start.attempt > newest

    return [[one for one in streams if wanted(one, place)] for place, streams in enumerate(starts)]


def _header(path: Path) -> Header | None:
    try:
        with path.open("rb") as file:
            header = decode_line(file.readline(_TAIL))
    except (OSError, RecordError):
        return None
    return header if isinstance(header, Header) else None


def _last_seq(paths: list[Path]) -> int:
    """Return the number of the last whole line that can be read, 0 where there is none."""
    for path in reversed(paths):
        try:
            with path.open("rb") as file:
                file.seek(max(0, path.stat().st_size - _TAIL))
                tail = file.read()
        except OSError:
            continue
        for line in reversed(tail[: tail.rfind(b"\n") + 1].split(b"\n")):
            if not line.strip():
                continue
            try:
                item = decode_line(line)
            except RecordError:
                continue
            if not isinstance(item, Header):
                return item.seq
    return 0
