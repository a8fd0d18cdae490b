"""The shards of a data set: which rows belong to which named piece of it, as the person who wraps the loader says."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np

from .permutation import Indices


@dataclass(frozen=True, slots=True)
class Shard:
    """Rows ``[first, end)`` of the data set, under a name."""

    name: str
    first: int
    end: int


class Shards:
    """Named, disjoint, non-empty pieces of a data set of ``rows`` rows, in the order given. They need not cover it.

    Raises:
        TypeError: an entry is no ``(name, first_row, end_row)``.
        ValueError: an entry is empty, lies outside the data set, overlaps another, or has its name.
    """

    def __init__(self, given: Iterable[Any], rows: int) -> None:
        self.all = tuple(_shard(entry, number) for number, entry in enumerate(given))
        by_row = sorted(range(len(self.all)), key=lambda number: self.all[number].first)
        names: set[str] = set()
        before: Shard | None = None
        for number in by_row:
            shard = self.all[number]
            if not 0 <= shard.first < shard.end <= rows:
                raise ValueError(
                    f"shards: {shard.name!r}: rows [{shard.first}, {shard.end}) are not within the {rows} rows of the data set"
                )
            if before is not None and shard.first < before.end:
                raise ValueError(f"shards: {shard.name!r} begins at row {shard.first}, inside {before.name!r}")
            if shard.name in names:
                raise ValueError(f"shards: {shard.name!r} is there twice; give each its own name")
            names.add(shard.name)
            before = shard
        self._by_row = np.array(by_row, dtype=np.int64)
        self._firsts = np.array([self.all[number].first for number in by_row], dtype=np.int64)
        self._ends = np.array([self.all[number].end for number in by_row], dtype=np.int64)

    def __len__(self) -> int:
        return len(self.all)

    def of(self, rows: Indices) -> Indices:
        """Return for each row the number of its shard in :attr:`all`, -1 where it is in none."""
        if not self.all:
            return np.full(rows.shape, -1, dtype=np.int64)
        slots = np.searchsorted(self._firsts, rows, side="right") - 1
        inside = (slots >= 0) & (rows < self._ends[np.maximum(slots, 0)])
        found: Indices = np.where(inside, self._by_row[np.maximum(slots, 0)], -1)
        return found

    def named(self, name: str) -> Shard | None:
        """Return the shard of that name."""
        return next((shard for shard in self.all if shard.name == name), None)


def _shard(entry: Any, number: int) -> Shard:
    try:
        name, first, end = entry
        return Shard(str(name), int(first), int(end))
    except (TypeError, ValueError):
        raise TypeError(f"shards[{number}]: {entry!r} is no (name, first_row, end_row)") from None
