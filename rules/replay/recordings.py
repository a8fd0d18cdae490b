"""What a command line names, as recordings: journals by run, foreign logs one a file.

:func:`find_recordings` looks at each file's beginning alone; :func:`merged` reads.
"""

from __future__ import annotations

import re
import shutil
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import IO, Any

import msgspec

from trainwarden.record import Header, RecordError, Step, decode_line
from trainwarden.rules.core.language.errors import did_you_mean

from .attempts import SPACE, Attempts, Placed
from .columns import Columns
from .files import ReplayError, ignore, matching, read_head, read_lines
from .journal import Stream, add_file, merged_streams, put_in_order, read_header
from .readers import FORMATS, HEAD_BYTES, make_reader, recognise
from .rows import Notices

#: The format of the exporter's own files.
JOURNAL = "journal"

#: How names of TensorBoard's files begin, and the names that programs always give their logs.
_EVENTS = "events.out.tfevents."
_FIXED = ("metrics.csv", "trainer_state.json")


class Recording(msgspec.Struct):
    """One run as it was recorded: the streams of a journal, or one foreign log.

    ``source`` says what was asked for: the one file or folder, or the first of several. ``notices`` are what reading said of the
    log itself, ``columns`` the names that a foreign log gives its numbers; both are complete once all lines were read.
    """

    source: str
    run: str
    run_uid: str
    streams: list[Stream] = []
    format: str = JOURNAL
    files: list[Path] = []
    maps: dict[str, str] = {}
    notices: list[dict[str, Any]] = []
    columns: list[str] = []

    def paths(self) -> list[Path]:
        """Return all files."""
        return self.files or [path for stream in self.streams for path in stream.files]

    def stream_names(self) -> set[str]:
        """Return the streams of a journal as a daemon's database names them: ``"start_id/rank"``."""
        return {f"{stream.start.start_id}/{stream.rank}" for stream in self.streams}


class Problem(msgspec.Struct, frozen=True):
    """A file that cannot be read, with the sentence that says so."""

    name: str
    says: str


def find_recordings(
    names: Iterable[str],
    standard_input: IO[bytes],
    spool: Path,
    *,
    format: str = "auto",
    maps: Mapping[str, str] | None = None,
    problems: list[Problem] | None = None,
) -> list[Recording]:
    """Return the recordings that files, globs, folders and ``-`` (standard input) name, in the order of their naming.

    Standard input and pipes are written into ``spool``, an empty folder that the caller removes; journals are split at their headers.
    ``format`` is ``auto``, ``journal`` or a name of ``readers.FORMATS``. ``maps`` gives signals to columns.
    Where ``problems`` is given, files that cannot be read are put there and the others are returned.

    Raises:
        ReplayError: a name matches nothing, or a file is no log that is known, and ``problems`` is not given.
    """
    finding = _Finding(format, dict(maps or {}))
    for name in names:
        try:
            found = (
                _spooled(name, standard_input, spool) if name == "-" else finding.without_pipes(matching(name), spool)
            )
        except ReplayError as error:
            if problems is None:
                raise
            problems.append(Problem(name, str(error)))
            continue
        for path in found:
            try:
                finding.add(name, path)
            except ReplayError as error:
                if problems is None:
                    raise
                problems.append(Problem(str(path), str(error)))
    return finding.recordings()


def merged(recording: Recording, told: Callable[[int], None] = ignore) -> Iterator[Placed]:
    """Yield all lines of a recording in order; ``told(bytes)`` hears how much was read.

    Raises:
        ReplayError: the file cannot be read, or holds no step.
    """
    faults: dict[Path, str] = {}
    records = 0
    notices = Notices()
    lines = _journal if recording.format == JOURNAL else _log

    def damaged(path: Path, what: str) -> None:
        faults.setdefault(path, what)

    for placed in lines(recording, told, damaged, notices):
        records += isinstance(placed[2], Step)
        yield placed
    for path, what in faults.items():
        of_all = " of all files" if len(recording.paths()) > 1 else ""
        says = f"{path.name} is damaged ({what}): what could be read was read, {records:,} record{'' if records == 1 else 's'}{of_all}."
        notices.add("damaged", says, signal=str(path))
    recording.notices = [
        {**row, "signal": None} if row["signal"] in map(str, faults) else row for row in notices.rows()
    ]
    if not records and recording.format != JOURNAL:
        said = " ".join(row["says"] for row in recording.notices[:3])
        raise ReplayError(f"{recording.source}: read as {recording.format}, it holds no step. {said}".rstrip())


def _journal(
    recording: Recording, told: Callable[[int], None], damaged: Callable[[Path, str], None], notices: Notices
) -> Iterator[Placed]:
    return merged_streams(recording.streams, told, damaged)


def _log(
    recording: Recording, told: Callable[[int], None], damaged: Callable[[Path, str], None], notices: Notices
) -> Iterator[Placed]:
    columns = Columns(recording.maps, notices)
    attempts = Attempts(recording.run_uid, recording.run, columns, notices)
    for path in recording.files:
        reader = make_reader(recording.format, notices)
        lines = read_lines(path, told, partial(damaged, path))
        yield from attempts.feed(reader.read(lines))
        reader.end()
    yield from attempts.end()
    recording.columns = columns.names()


def lost_columns(recordings: Iterable[Recording], maps: Mapping[str, str]) -> list[str]:
    """Return a sentence for each ``--map`` whose column none of the logs has, once they were read."""
    read = list(recordings)
    if read and all(recording.format == JOURNAL for recording in read):
        return [f"--map {signal}={column}: a journal has signals and no columns" for column, signal in maps.items()]
    there = list(dict.fromkeys(name for recording in read for name in recording.columns))
    listed = ", ".join(there[:20]) or "none"
    return [
        f"--map {signal}={column}: no file has numbers in such a column"
        + (did_you_mean(column, there) or f"; there are: {listed}")
        for column, signal in maps.items()
        if there and column not in there
    ]


class _Finding:
    """The recordings of one command line as they are found."""

    def __init__(self, format: str, maps: dict[str, str]) -> None:
        self._format = format
        self._maps = maps
        self._found: dict[str, Recording] = {}
        self._sources: dict[str, list[str]] = {}
        self._piped: dict[Path, str] = {}

    def without_pipes(self, paths: list[Path], spool: Path) -> list[Path]:
        """Return the files, with what came through a pipe, such as a shell's ``<(zcat old.log.gz)``, written into one of its own.

        Raises:
            ReplayError: a pipe cannot be read, or nothing came.
        """
        found: list[Path] = []
        for path in paths:
            if not path.is_fifo():
                found.append(path)
                continue
            folder = spool / f"pipe-{len(self._piped)}"
            try:
                with path.open("rb") as pipe:
                    folder.mkdir()
                    files = _spooled(str(path), pipe, folder)
            except OSError as error:
                raise ReplayError(f"{path}: cannot be read: {error.strerror or error}") from None
            self._piped.update(dict.fromkeys(files, str(path)))
            found += files
        return found

    def add(self, name: str, path: Path) -> None:
        """Take in a file or a folder.

        Raises:
            ReplayError: it is none that is known.
        """
        if path.is_dir():
            for files in _inside(path):
                self._add_files(name, files)
        else:
            self._add_files(name, [path])

    def _add_files(self, name: str, files: list[Path]) -> None:
        path = files[0]
        format = self._format_of(name, path)
        if format == JOURNAL:
            for file in files:
                self._add_journal(name, file)
        else:
            self._add_log(name, files, format)

    def recordings(self) -> list[Recording]:
        """Return what was found, complete."""
        for key, recording in self._found.items():
            more = len(self._sources[key]) - 1
            recording.source = self._sources[key][0] + (f" and {more} more" if more else "")
            put_in_order(recording.streams)
        return list(self._found.values())

    def _format_of(self, name: str, path: Path) -> str:
        if self._format != "auto":
            return self._format
        head = read_head(path, HEAD_BYTES)
        if is_journal(head.partition(b"\n")[0]):
            return JOURNAL
        shown = name if name == "-" else self._piped.get(path, str(path))
        if not head.strip():
            raise ReplayError(f"{shown}: the file is empty")
        format = recognise(head, path.name)
        if format is None:
            raise ReplayError(
                f"{shown}: is no log that is known; --format names one of {', '.join([JOURNAL, *FORMATS])}"
            )
        return format

    def _add_journal(self, name: str, path: Path) -> None:
        header = read_header(path)
        recording = self._found.setdefault(header.run_uid, Recording(name, header.run, header.run_uid))
        self._note(header.run_uid, name)
        add_file(recording.streams, header, path)

    def _add_log(self, name: str, files: list[Path], format: str) -> None:
        path = files[0]
        given = name if name == "-" else self._piped.get(path)
        key = str(uuid.uuid5(SPACE, given or str(path.resolve())))
        run = "stdin" if name == "-" else run_of(path)
        shown = given or str(path if len(files) == 1 else path.parent)
        self._found.setdefault(key, Recording(shown, run, key, format=format, files=files, maps=self._maps))
        self._note(key, shown)

    def _note(self, key: str, name: str) -> None:
        sources = self._sources.setdefault(key, [])
        if name not in sources:
            sources.append(name)


def run_of(path: Path) -> str:
    """Return the name of the run whose log ``path`` is: the file's, or where that says only its format, the folder's."""
    name = path.name
    if name.startswith(_EVENTS) or name.removesuffix(".gz") in _FIXED:
        folder = path.absolute().parent
        while folder.name.startswith("checkpoint-"):
            folder = folder.parent
        return folder.name or name
    for ending in (".gz", ".csv", ".tsv", ".jsonl", ".ndjson", ".json", ".log", ".txt", ".out", ".err"):
        name = name.removesuffix(ending)
    return name or path.name


def _inside(folder: Path) -> list[list[Path]]:
    """Return the files of the logs in a folder: journals, else the files that programs give fixed names; event files of one folder
    are one log, and of several ``trainer_state.json`` that of the last checkpoint holds all.

    Raises:
        ReplayError: there is none.
    """
    journals = sorted(item for pattern in ("*.ndjson", "*.ndjson.gz") for item in folder.rglob(pattern))
    if journals:
        return [journals]
    found: dict[tuple[Path, str], list[Path]] = {}
    for path in sorted(folder.rglob("*"), key=_by_number):
        if path.name.startswith(_EVENTS):
            found.setdefault((path.parent, _EVENTS), []).append(path)
        elif path.name.removesuffix(".gz") in _FIXED:
            run = path.parent.parent if path.parent.name.startswith("checkpoint-") else path.parent
            found[run, path.name] = [path]
    if not found:
        kinds = ", ".join(["*.ndjson", f"{_EVENTS}*", *_FIXED])
        raise ReplayError(f"{folder}: no log in this folder (of {kinds}); name the files themselves")
    return list(found.values())


def _by_number(path: Path) -> list[tuple[int, str]]:
    """Order ``checkpoint-900`` before ``checkpoint-1000``."""
    return [(int(part) if part.isdigit() else -1, part) for part in re.split(r"(\d+)", str(path))]


def is_journal(line: bytes) -> bool:
    """Say whether a file that begins with this line is meant as a journal, also one without header or of another version."""
    try:
        found = msgspec.json.decode(line)
    except (msgspec.DecodeError, UnicodeError, RecursionError):
        return False
    if not isinstance(found, dict):
        return False
    return {"schema", "run_uid"} <= found.keys() or (found.get("type") in ("step", "event") and "seq" in found)


def _is_header(line: bytes) -> bool:
    if b'"schema"' not in line:
        return False
    try:
        return isinstance(decode_line(line), Header)
    except RecordError:
        return False


def _spooled(name: str, standard_input: IO[bytes], spool: Path) -> list[Path]:
    """Write standard input or a pipe into files: as it is, but journals split at their headers."""
    whole = spool / ("stdin" if name == "-" else name.rpartition("/")[2])
    with whole.open("wb") as file:
        shutil.copyfileobj(standard_input, file)
    if not whole.stat().st_size:
        raise ReplayError("-: standard input is empty" if name == "-" else f"{name}: the file is empty")
    if not _is_header(read_head(whole, HEAD_BYTES).partition(b"\n")[0]):
        return [whole]
    files: list[Path] = []
    opened: IO[bytes] | None = None
    try:
        for line in read_lines(whole):
            if _is_header(line) or opened is None:
                if opened is not None:
                    opened.close()
                files.append(spool / f"{len(files) + 1:05}.ndjson")
                opened = files[-1].open("wb")
            opened.write(line)
    finally:
        if opened is not None:
            opened.close()
    whole.unlink()
    return files
