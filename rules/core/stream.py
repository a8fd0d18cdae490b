"""Order: the only place that knows in which order lines arrive.

A record is released once, in the order of steps, when every expected rank has reported its step or a watermark has passed; what
comes later is counted and never evaluated. Duplicates (by sequence number) are dropped, gaps are counted. A rank that was passed
by the watermark is no longer awaited until it reports at the head again, so that a dead exporter delays the others once.
Everything here goes record by record: how the driver cuts the records into inputs makes no difference.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from operator import lt
from typing import Any

from msgspec import Struct, field, structs

from trainwarden.plan import merge_ranges
from trainwarden.record import Step, decode_line, encode_line

#: No step waits longer than this many steps, whatever its time says and whoever is known to be catching up.
PATIENCE_STEPS = 20_000


class Held:
    """A record that waits for the other ranks. Stored as its line, by the record codec alone."""

    __slots__ = ("record",)

    def __init__(self, record: Step) -> None:
        self.record = record

    def line(self) -> bytes:
        """Return the record as its line."""
        return encode_line(self.record)

    @staticmethod
    def of_line(line: bytes) -> Held:
        """Return the record of a stored line."""
        record = decode_line(line)
        assert isinstance(record, Step)
        return Held(record)


class Cursor(Struct):
    """How far one rank's lines were read. ``behind`` says that its source knows of lines not read yet."""

    last_seq: int = 0
    last_step: int = -1
    last_time: float = math.nan
    behind: bool = False


class Line(Struct):
    """The lines of one start. ``awaited`` are the ranks that a step waits for, None: all of them; counts are since the start.

    ``world_size`` is what a peer says: nothing here takes time or memory in proportion to it.
    """

    world_size: int = 1
    cursors: dict[int, Cursor] = field(default_factory=dict)
    awaited: list[int] | None = None
    pending: dict[int, dict[int, Held]] = field(default_factory=dict)
    released: int = -1
    newest_step: int = -1
    newest_time: float = math.nan
    missed: int = 0
    duplicates: int = 0
    late: int = 0
    #: Of the late ones those behind their own rank's newest step, and the step of the first of them.
    unordered: int = 0
    first_unordered: int | None = None


@dataclass(frozen=True, slots=True)
class Gap:
    """``missed`` lines of ``rank`` before sequence number ``seq`` never arrived."""

    rank: int
    seq: int
    missed: int


class Released(Struct, frozen=True, gc=False):
    """The merged record of a step (that of the lowest reporting rank) and every rank's own, where there are several."""

    record: Step
    by_rank: dict[int, Step]


def admit(line: Line, rank: int, seq: int) -> Gap | bool:
    """Count one line by its sequence number: False for a duplicate, a Gap if lines before it are missing, else True.

    Lines without a number (seq 0, a foreign log) are always taken.
    """
    cursor = line.cursors.setdefault(rank, Cursor())
    if seq <= 0:
        return True
    if seq <= cursor.last_seq:
        line.duplicates += 1
        return False
    missed = seq - cursor.last_seq - 1
    cursor.last_seq = seq
    if missed:
        line.missed += missed
        return Gap(rank, seq, missed)
    return True


def take(line: Line, rank: int, record: Step, watermark_steps: int, watermark_seconds: float) -> list[Released]:
    """Take one admitted record and return what it releases, in order of steps."""
    cursor = line.cursors.setdefault(rank, Cursor())
    newest = cursor.last_step
    cursor.last_step = max(newest, record.step)
    cursor.last_time = record.time
    if record.step <= line.released or rank in line.pending.get(record.step, {}):
        line.late += 1
        if record.step <= newest:
            line.unordered += 1
            if line.first_unordered is None:
                line.first_unordered = record.step
        return []
    if line.awaited is not None and rank < line.world_size and rank not in line.awaited:
        line.awaited.append(rank)
    if line.world_size == 1 and not line.pending:
        line.released = line.newest_step = record.step
        line.newest_time = record.time
        return [Released(record, {})]
    line.pending.setdefault(record.step, {})[rank] = Held(record)
    line.newest_step = max(line.newest_step, record.step)
    if not record.time <= line.newest_time:
        line.newest_time = record.time
    return _ready(line, line.newest_step - watermark_steps, line.newest_time - watermark_seconds)


def take_row(line: Line, rank: int, records: Sequence[Step]) -> list[Released] | None:
    """Admit and take records that are simply the next ones of the only rank; None where that is not so.

    Does what :func:`admit` and :func:`take` do one after another.
    """
    cursor = line.cursors.get(rank)
    if cursor is None or line.world_size != 1 or line.pending or not records:
        return None
    if line.awaited is not None and rank < line.world_size and rank not in line.awaited:
        return None
    first, last = records[0], records[-1]
    steps = [record.step for record in records]
    if first.step <= line.released or not all(map(lt, steps, steps[1:])):
        return None
    seqs = [record.seq for record in records]
    if first.seq == cursor.last_seq + 1 and seqs == list(range(first.seq, first.seq + len(seqs))):
        cursor.last_seq = last.seq
    elif max(seqs) > 0:
        return None
    cursor.last_step = max(cursor.last_step, last.step)
    cursor.last_time = last.time
    line.released = line.newest_step = last.step
    line.newest_time = last.time
    return [Released(record, {}) for record in records]


def pass_time(line: Line, before: float) -> list[Released]:
    """Release what waits for ranks although its record is older than ``before`` (Unix seconds)."""
    return _ready(line, line.newest_step, before)


def flush(line: Line) -> list[Released]:
    """Release all that waits: the start has ended."""
    found = [_merge(line.pending[step]) for step in sorted(line.pending)]
    line.pending.clear()
    if found:
        line.released = found[-1].record.step
    return found


def widen(line: Line, world_size: int) -> None:
    """Take a start's word for how many ranks it has; ranks that were not known of are awaited."""
    if world_size > line.world_size:
        line.world_size, line.awaited = world_size, None


def _ready(line: Line, oldest_step: int, oldest_time: float) -> list[Released]:
    found: list[Released] = []
    for step in sorted(line.pending):
        reported = line.pending[step]
        if not _complete(line, reported):
            overdue = step <= oldest_step and min(held.record.time for held in reported.values()) < oldest_time
            if line.newest_step - step < PATIENCE_STEPS and (not overdue or _catching_up(line, reported)):
                break
            line.awaited = [rank for rank in reported if _awaited(line, rank)]
        found.append(_merge(line.pending.pop(step)))
        line.released = step
    return found


def _awaited(line: Line, rank: int) -> bool:
    return rank < line.world_size if line.awaited is None else rank in line.awaited


def _complete(line: Line, reported: dict[int, Held]) -> bool:
    if line.awaited is not None:
        return all(rank in reported for rank in line.awaited)
    return sum(rank < line.world_size for rank in reported) >= line.world_size


def _catching_up(line: Line, reported: dict[int, Held]) -> bool:
    return any(cursor.behind and rank not in reported and _awaited(line, rank) for rank, cursor in line.cursors.items())


def _merge(reported: dict[int, Held]) -> Released:
    by_rank = {rank: reported[rank].record for rank in sorted(reported)}
    lead = by_rank[min(by_rank)]
    if len(by_rank) == 1:
        return Released(lead, {})
    samples = merge_ranges([pair for record in by_rank.values() for pair in record.samples])
    if samples == merge_ranges(lead.samples):
        return Released(lead, by_rank)
    # Each rank reports its own part of the batch: together they are the step's.
    spans = tuple({span: None for record in by_rank.values() for span in record.shards})
    signals = dict(lead.signals)
    substituted = [record.value("substituted_samples") for record in by_rank.values()]
    if any(value is not None for value in substituted):
        signals["substituted_samples"] = float(sum(value or 0.0 for value in substituted))
    merged: Any = structs.replace(lead, samples=samples, shards=list(spans), signals=signals)
    return Released(merged, by_rank)
