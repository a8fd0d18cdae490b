"""Finds the records of steps in the journals of a run's folder, without reading all of them.

A journal's lines are searched for the step's number as the exporter writes it; only what was found is decoded.
"""

from __future__ import annotations

import mmap
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from trainwarden.record import Event, RecordError, Step, decode_line
from trainwarden.rules.core.language.errors import did_you_mean
from trainwarden.runfolder import RunFolder, RunFolderError, base_folder

#: Bytes at the two ends of a file in which its first and last step are looked for.
_END = 1 << 18
#: Ranks of a run, beyond which a start event is not believed.
_MOST_RANKS = 1 << 20
#: Names of runs that are listed where the one asked for is not there.
_MOST_NAMES = 8


class DataError(ValueError):
    """What was asked for cannot be shown. The message says what is there and what to do."""


@dataclass(frozen=True, slots=True)
class Record:
    """One rank's record of a step; ``start`` are the fields of the start event that it belongs to, where that is there."""

    attempt: int
    start_id: str
    rank: int
    step: Step
    start: dict[str, Any] | None


@dataclass(slots=True)
class Found:
    """The records of each step, ranks ascending, and sentences about what is missing, damaged or superseded."""

    steps: dict[int, list[Record]] = field(default_factory=dict)
    notices: list[str] = field(default_factory=list)


@dataclass(slots=True)
class _Start:
    """The journals of one start by rank; ``begun`` are the fields of each rank's start event."""

    attempt: int
    start_id: str
    files: dict[int, list[Path]] = field(default_factory=dict)
    _begun: dict[int, dict[str, Any] | None] = field(default_factory=dict)

    def begun(self, rank: int) -> dict[str, Any] | None:
        if rank not in self._begun:
            events = (line for line in _head(self.files[rank][0]) if isinstance(line, Event) and line.kind == "start")
            event = next(events, None)
            self._begun[rank] = None if event is None else _usable(event.fields)
        return self._begun[rank]

    @property
    def resumed_from(self) -> int | None:
        """The step whose state this start began from, 0 from scratch, None where its start event is not there."""
        begun = next((fields for rank in self.files if (fields := self.begun(rank)) is not None), None)
        if begun is None:
            return None
        told = begun.get("resumed_from")
        return int(told["step"]) if isinstance(told, dict) and isinstance(told.get("step"), int) else 0


def _usable(fields: dict[str, Any]) -> dict[str, Any]:
    """Return a start event's fields without those that are not what they have to be: nobody vouches for a journal."""
    world, size = fields.get("world_size"), fields.get("dataset_size")
    damaged = {
        "world_size": not (type(world) is int and 0 < world <= _MOST_RANKS),
        "dataset_size": not (type(size) is int and size >= 0),
        "dataset": not isinstance(fields.get("dataset"), str),
        "loader": not isinstance(fields.get("loader"), dict),
    }
    return {name: value for name, value in fields.items() if not damaged.get(name)}


def open_run(run: str, base: Path | None) -> RunFolder:
    """Return the folder of a run that is there.

    Raises:
        DataError: it is not; the message names runs that are.
    """
    base = base or base_folder()
    try:
        folder = RunFolder(run, base)
    except RunFolderError as error:
        raise DataError(str(error)) from None
    if folder.path.is_dir():
        return folder
    if not base.is_dir():
        raise DataError(f"{base}: no such folder of runs; name it with --dir, or set TRAINWARDEN_DIR")
    names = sorted(path.name for path in base.iterdir() if any(path.glob("attempt-*")))
    listed = ", ".join(names[:_MOST_NAMES]) + (
        f" and {len(names) - _MOST_NAMES} more" if len(names) > _MOST_NAMES else ""
    )
    there = f"; there are {listed}" if names else "; it holds no run"
    raise DataError(f"{base}: no run {run!r}{did_you_mean(run, names) or there}")


def find(folder: RunFolder, wanted: Sequence[int], attempt: int | None = None, rank: int | None = None) -> Found:
    """Return what each wanted step ate: of ``attempt``, else of the newest one that made it; of ``rank``, else of all ranks.

    Raises:
        DataError: nothing at all was recorded of any of the steps; the message says which ones there are.
    """
    starts = _starts(folder)
    if not starts:
        raise DataError(f"{folder.path}: holds no journal")
    attempts = sorted({start.attempt for start in starts})
    if attempt is not None and attempt not in attempts:
        raise DataError(f"run {folder.run}: there is no attempt {attempt}; {_listed('attempt', attempts)}")
    chosen = [start for start in starts if attempt in (None, start.attempt)]
    ranks = sorted({known for start in chosen for known in start.files})
    if rank is not None and rank not in ranks:
        raise DataError(f"run {folder.run}: rank {rank} left no journal; {_listed('rank', ranks)}")
    found = Found()
    elsewhere: dict[tuple[int, str], list[int]] = {}
    for start in reversed(starts):
        if attempt is not None and start.attempt != attempt:
            continue
        of_start: dict[int, list[Record]] = {}
        for of_rank in sorted(start.files):
            if rank in (None, of_rank):
                for step in _steps(start.files[of_rank], wanted, found.notices):
                    record = Record(start.attempt, start.start_id, of_rank, step, start.begun(of_rank))
                    of_start.setdefault(step.step, []).append(record)
        for number, records in of_start.items():
            if number in found.steps:
                elsewhere.setdefault((start.attempt, start.start_id), []).append(number)
            else:
                found.steps[number] = records
    if not found.steps:
        raise DataError("\n".join([*found.notices, _unrecorded(folder, wanted, chosen, attempt)]))
    missing = [number for number in wanted if number not in found.steps]
    if missing:
        found.notices.append(f"{_named('step', missing)}: not recorded")
    found.steps = dict(sorted(found.steps.items()))
    _tell_of_other_starts(found, starts, elsewhere, attempt)
    if rank is None:
        _tell_of_missing_ranks(found)
    return found


def _starts(folder: RunFolder) -> list[_Start]:
    """Return the starts of a run, the oldest first."""
    starts: dict[Path, _Start] = {}
    for path in folder.journal_files():
        of_rank, of_start = path.parent, path.parent.parent
        known = starts.setdefault(of_start, _Start(int(of_start.parent.name.removeprefix("attempt-")), of_start.name))
        known.files.setdefault(int(of_rank.name.removeprefix("rank-")), []).append(path)
    return list(starts.values())


def _steps(files: Sequence[Path], wanted: Sequence[int], notices: list[str]) -> Iterator[Step]:
    """Yield the wanted steps of one rank's journal."""
    left = set(wanted)
    for path in files:
        if not left or not path.stat().st_size:
            continue
        span = _span([path]) or (min(left), max(left))
        # The newest file may end in a record that was cut off: it is looked for there as well.
        here = sorted(number for number in left if span[0] <= number and (number <= span[1] or path == files[-1]))
        if not here:
            continue
        with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
            at = 0
            for number in here:
                found = _step(path, data, number, at, notices)
                if found is not None:
                    at, step = found
                    left.discard(number)
                    yield step


def _step(path: Path, data: mmap.mmap, number: int, after: int, notices: list[str]) -> tuple[int, Step] | None:
    """Return the record of a step and where it ends. It is looked for behind ``after`` first: steps ascend."""
    needle = b'"step":%d,' % number
    at = data.find(needle, after)
    if at < 0 and after:
        after, at = 0, data.find(needle, 0, after)
    while at >= 0:
        begin, end = data.rfind(b"\n", 0, at) + 1, data.find(b"\n", at)
        line = data[begin : len(data) if end < 0 else end]
        if line.startswith(b'{"type":"step"'):
            try:
                found = decode_line(line)
            except RecordError as error:
                why = "was cut off while it was written" if end < 0 else f"is damaged: {error}"
                notices.append(f"{path}: the record of step {number} {why}")
            else:
                if isinstance(found, Step) and found.step == number:
                    return max(end, 0), found
        at = data.find(needle, end) if end >= 0 else -1
    return None


def _head(path: Path) -> Iterator[Any]:
    """Yield the first lines of a journal, passing over what cannot be read."""
    with path.open("rb") as file:
        while file.tell() < _END:
            line = file.readline(_END)
            if not line:
                return
            try:
                yield decode_line(line)
            except RecordError:
                continue


def _span(files: Sequence[Path]) -> tuple[int, int] | None:
    """Return the first and last step of a rank's journal, as far as its two ends show them."""
    first = next((line.step for path in files for line in _head(path) if isinstance(line, Step)), None)
    if first is None:
        return None
    for path in reversed(files):
        with path.open("rb") as file:
            file.seek(max(0, path.stat().st_size - _END))
            tail = file.read().split(b"\n")
        for line in reversed(tail):
            try:
                found = decode_line(line)
            except RecordError:
                continue
            if isinstance(found, Step):
                return first, found.step
    return first, first


def _unrecorded(folder: RunFolder, wanted: Sequence[int], chosen: Sequence[_Start], attempt: int | None) -> str:
    what = f"step {wanted[0]}" if len(wanted) == 1 else f"none of the steps {wanted[0]} to {wanted[-1]}"
    verb = "was not recorded" if len(wanted) == 1 else "was recorded"
    spans: dict[int, tuple[int, int]] = {}
    for start in chosen:
        for files in start.files.values():
            span = _span(files)
            if span is not None:
                known = spans.get(start.attempt, span)
                spans[start.attempt] = (min(known[0], span[0]), max(known[1], span[1]))
    if not spans:
        of = "run" if attempt is None else f"attempt {attempt} of run"
        return f"{of} {folder.run}: no step was recorded"
    have = ", ".join(f"attempt {number} has steps {first} to {last}" for number, (first, last) in sorted(spans.items()))
    return f"run {folder.run}: {what} {verb}; {have}"


def _tell_of_other_starts(
    found: Found, starts: Sequence[_Start], elsewhere: dict[tuple[int, str], list[int]], attempt: int | None
) -> None:
    """Say where a step was made more than once, and where what is shown was left behind by a later attempt."""
    for (other, start_id), numbers in sorted(elsewhere.items()):
        made = _named("step", numbers)
        same = all(found.steps[number][0].attempt == other for number in numbers)
        if same:
            found.notices.append(f"start {start_id} of attempt {other} made {made} before; the newer start is shown")
        else:
            found.notices.append(f"attempt {other} made {made} as well; --attempt {other} shows what it read")
    if attempt is None:
        return
    for number in sorted(found.steps):
        for start in starts:
            begun = start.resumed_from if start.attempt > attempt else None
            if begun is not None and begun < number:
                found.notices.append(
                    f"attempt {start.attempt} went on from step {begun}: what attempt {attempt} did from step {begun + 1} on was left behind"
                )
                return


def _tell_of_missing_ranks(found: Found) -> None:
    told: set[tuple[str, tuple[int, ...]]] = set()
    for number, records in found.steps.items():
        world = next(
            (record.start["world_size"] for record in records if record.start and record.start.get("world_size")), None
        )
        missing = tuple(sorted(set(range(world or 0)) - {record.rank for record in records}))
        key = (records[0].start_id, missing)
        if missing and key not in told:
            told.add(key)
            found.notices.append(
                f"step {number}: {_named('rank', missing)} of {world} left no record here; their samples are not shown"
            )


def _named(what: str, numbers: Sequence[int]) -> str:
    """Return ``rank 0``, ``ranks 0 to 3`` or ``ranks 0, 2, 5``."""
    ordered = sorted(numbers)
    if len(ordered) == 1:
        return f"{what} {ordered[0]}"
    if ordered[-1] - ordered[0] == len(ordered) - 1:
        return f"{what}s {ordered[0]} to {ordered[-1]}"
    return f"{what}s {', '.join(map(str, ordered[:_MOST_NAMES]))}{' …' if len(ordered) > _MOST_NAMES else ''}"


def _listed(what: str, numbers: Sequence[int]) -> str:
    return f"there {'is' if len(numbers) == 1 else 'are'} {_named(what, numbers)}"
