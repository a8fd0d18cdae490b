"""The columns of a recording, kept while a replay reads it, for drawing.

Absent, NaN and zero stay three things: a value that was not logged is not in a track; what is in it may be non-finite.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import TypeAlias

import numpy as np
from msgspec import structs

from trainwarden.record import Event, Step, Value
from trainwarden.rules.core.block import Key
from trainwarden.rules.core.inputs import Start
from trainwarden.signals import BY_NAME

from .thinning import Floats, Ints

#: A line of a recording with the start and the rank that it belongs to.
Line: TypeAlias = tuple[Start, int, "Step | Event"]


class Track:
    """One number over the records of a start: its rows and values where it was logged."""

    __slots__ = ("rows", "values")

    def __init__(self) -> None:
        self.rows = array("I")
        self.values = array("d")


@dataclass(frozen=True, slots=True)
class Column:
    """One number at the steps at which it was logged, ascending; non-finite values are among them."""

    steps: Ints  # (n,)
    values: Floats  # (n,)

    def between(self, first: float, last: float) -> Column:
        """Return the part at steps ``first`` to ``last``, both included."""
        part = slice(int(np.searchsorted(self.steps, first)), int(np.searchsorted(self.steps, last, side="right")))
        return Column(self.steps[part], self.values[part])


@dataclass(slots=True)
class StartColumns:
    """What one rank of one start recorded."""

    start: Start
    rank: int
    steps: array[int] = field(default_factory=lambda: array("q"))
    strides: array[int] = field(default_factory=lambda: array("q"))
    tracks: dict[Key, Track] = field(default_factory=dict)
    events: list[Event] = field(default_factory=list)

    def add(self, record: Step) -> None:
        """Take one record in."""
        row = len(self.steps)
        self.steps.append(record.step)
        self.strides.append(record.stride)
        for name, value in record.signals.items():
            for key, number in _numbers((name,), value):
                track = self.tracks.get(key)
                if track is None:
                    track = self.tracks[key] = Track()
                track.rows.append(row)
                track.values.append(number)

    def hear(self, event: Event) -> None:
        """Take one event in; one that names no step happened behind the newest record."""
        if event.step is None and self.steps:
            event = structs.replace(event, step=self.steps[-1])
        self.events.append(event)

    def column(self, key: Key) -> Column:
        """Return one column, empty where nothing was logged under this key."""
        track = self.tracks.get(key)
        if track is None:
            return Column(np.zeros(0, dtype=np.int64), np.zeros(0))
        rows = np.frombuffer(track.rows, dtype=np.uint32)
        steps = np.frombuffer(self.steps, dtype=np.int64)[rows]
        values = np.frombuffer(track.values, dtype=np.float64)
        if bool((np.diff(steps) < 0).any()):  # a rank that wrote late; a restart is a start of its own
            order = np.argsort(steps, kind="stable")
            return Column(steps[order], values[order])
        return Column(steps, values)


def _numbers(key: Key, value: Value) -> Iterator[tuple[Key, float]]:
    """Yield the numbers of one signal; a bare number of a grouped signal of the table counts as ``all``."""
    if isinstance(value, dict):
        for label, item in value.items():
            yield from _numbers((*key, label), item)
        return
    known = BY_NAME.get(key[0])
    missing = 0 if known is None else max(1 + len(known.labels) - len(key), 0)
    yield (*key, *("all",) * missing), value


class Recorded:
    """All columns of one recording, by start and rank in the order of their first lines."""

    def __init__(self) -> None:
        self._starts: dict[tuple[str, int], StartColumns] = {}

    def watch(self, lines: Iterable[Line]) -> Iterator[Line]:
        """Pass lines on and keep what they hold."""
        for start, rank, item in lines:
            key = (start.start_id, rank)
            kept = self._starts.get(key)
            if kept is None:
                kept = self._starts[key] = StartColumns(start, rank)
            if isinstance(item, Step):
                kept.add(item)
            else:
                kept.hear(item)
            yield start, rank, item

    @property
    def starts(self) -> list[StartColumns]:
        """The lowest rank of each start that has records, in the order of the starts."""
        lowest: dict[str, StartColumns] = {}
        for kept in self._starts.values():
            known = lowest.get(kept.start.start_id)
            if kept.steps and (known is None or kept.rank < known.rank):
                lowest[kept.start.start_id] = kept
        return list(lowest.values())

    def ranks_of(self, start_id: str) -> list[StartColumns]:
        """All ranks of a start, ascending."""
        return sorted(
            (kept for kept in self._starts.values() if kept.start.start_id == start_id), key=lambda kept: kept.rank
        )

    def extent(self) -> tuple[int, int]:
        """Return the first and the last step of all starts; (0, 1) where there is no record."""
        ends = [(min(kept.steps), max(kept.steps)) for kept in self.starts]
        if not ends:
            return 0, 1
        return min(first for first, _ in ends), max(last for _, last in ends)
