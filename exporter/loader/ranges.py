"""Half-open ranges and arrays of positions: from one to the other. What needs no arrays is in :mod:`trainwarden.ranges`."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from trainwarden.plan import merge_ranges
from trainwarden.record import Ranges

from .permutation import Indices

#: One bit an element: whether it is meant.
Mask = npt.NDArray[np.bool_]


def of_positions(positions: Indices) -> Ranges:
    """Return the ranges that hold exactly these positions; order and repetition do not matter."""
    if positions.size == 0:
        return []
    first, last = int(positions[0]), int(positions[-1])
    if last - first == positions.size - 1 and is_ascending(positions):
        return [(first, last + 1)]
    ordered = np.unique(positions)
    breaks = np.flatnonzero(np.diff(ordered) > 1)
    firsts = ordered[np.concatenate(([0], breaks + 1))]
    lasts = ordered[np.concatenate((breaks, [ordered.size - 1]))]
    return [(int(first), int(last) + 1) for first, last in zip(firsts, lasts, strict=True)]


def is_ascending(positions: Indices) -> bool:
    """Say whether each position is larger than the one before it."""
    return bool((positions[1:] > positions[:-1]).all())


class RangeSet:
    """Ranges laid out for asking about many positions at once."""

    __slots__ = ("_ends", "_firsts", "ranges")

    def __init__(self, ranges: Ranges) -> None:
        self.ranges = merge_ranges(ranges)
        self._firsts = np.array([first for first, _ in self.ranges], dtype=np.int64)
        self._ends = np.array([end for _, end in self.ranges], dtype=np.int64)

    def __bool__(self) -> bool:
        return bool(self.ranges)

    def holds(self, positions: Indices) -> Mask:
        """Say of each position whether it lies in one of the ranges."""
        slots = np.searchsorted(self._firsts, positions, side="right") - 1
        inside = slots >= 0
        inside[inside] = positions[inside] < self._ends[slots[inside]]
        return inside

    def touches(self, first: int, end: int) -> bool:
        """Say whether any position of ``[first, end)`` lies in one of the ranges."""
        slot = int(np.searchsorted(self._firsts, end, side="left")) - 1
        return slot >= 0 and int(self._ends[slot]) > first
