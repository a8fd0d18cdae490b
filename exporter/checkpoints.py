"""Which checkpoints a run has, read from its journals. Reading alone: nothing is opened, moved or deleted here.

A checkpoint is known by its path. A path that is written again holds the newer state; what was there before is gone.
"""

from __future__ import annotations

import mmap
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from trainwarden.record import Event, RecordError, decode_line, purpose_of
from trainwarden.runfolder import RunFolder

#: Occurs in every checkpoint event and in hardly any step line, so that a long journal is searched, not parsed.
_MARK = b'"checkpoint"'


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A checkpoint as its events describe it: the state after update ``step``, written by ``attempt``.

    ``finite`` is None where nobody looked. ``time`` is Unix seconds of its first report.
    """

    attempt: int
    step: int
    path: str
    start_id: str
    rank: int
    time: float
    complete: bool = False
    finite: bool | None = None
    deleted: bool = False
    pinned: bool = False
    quarantined: bool = False
    abandoned: bool = False


def catalogue(folder: RunFolder) -> list[Checkpoint]:
    """Return the run's checkpoints, ascending by attempt, then step, then time.

    Rank 0's journals are read, and the other ranks' only where it reported none. Torn and foreign lines are passed over.

    Raises:
        OSError: a journal cannot be read.
    """
    found = _read(folder, rank=0) or _read(folder, rank=None)
    return sorted(found, key=lambda checkpoint: (checkpoint.attempt, checkpoint.step, checkpoint.time))


def _read(folder: RunFolder, rank: int | None) -> list[Checkpoint]:
    known: dict[str, Checkpoint] = {}
    for file in folder.journal_files(rank):
        written_by = int(file.parent.name.removeprefix("rank-"))
        start_id = file.parent.parent.name
        attempt = int(file.parent.parent.parent.name.removeprefix("attempt-"))
        for event in checkpoint_events(file):
            path = event.fields.get("path")
            if not isinstance(path, str) or not path:
                continue
            before = known.get(path)
            step = event.step
            kept = event.fields.get("quarantined") is True or purpose_of(event) == "forensic"
            whole = event.fields.get("complete") is True or kept
            if whole and step is not None:
                # Several ranks may report one and the same save; the first report stands.
                same = before is not None and (before.start_id, before.step) == (start_id, step)
                if before is None or not same:
                    before = Checkpoint(attempt, step, path, start_id, written_by, event.time)
            if before is None:
                continue
            known[path] = _updated(before, event)
    return list(known.values())


def _updated(checkpoint: Checkpoint, event: Event) -> Checkpoint:
    fields = event.fields
    finite = fields.get("finite")
    if isinstance(finite, bool) and checkpoint.finite is not False:  # a state that one rank found broken is broken
        checkpoint = replace(checkpoint, finite=finite)
    return replace(
        checkpoint,
        complete=checkpoint.complete or fields.get("complete") is True,
        deleted=checkpoint.deleted or fields.get("deleted") is True,
        quarantined=checkpoint.quarantined or fields.get("quarantined") is True or purpose_of(event) == "forensic",
        pinned=bool(fields["pinned"]) if isinstance(fields.get("pinned"), bool) else checkpoint.pinned,
        abandoned=checkpoint.abandoned or fields.get("abandoned") is True,
    )


def checkpoint_events(file: Path) -> Iterator[Event]:
    """Yield the checkpoint events of one journal file."""
    with file.open("rb") as opened:
        if not opened.seek(0, 2):
            return
        with mmap.mmap(opened.fileno(), 0, access=mmap.ACCESS_READ) as data:
            at = data.find(_MARK)
            while at >= 0:
                first = data.rfind(b"\n", 0, at) + 1
                end = data.find(b"\n", at)
                end = len(data) if end < 0 else end
                try:
                    line = decode_line(data[first:end])
                except RecordError:
                    line = None
                if isinstance(line, Event) and line.kind == "checkpoint":
                    yield line
                at = data.find(_MARK, end)
