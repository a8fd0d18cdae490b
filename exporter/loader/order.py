"""The global order of an epoch: which row lies at which position, a function of seed, epoch and position alone.

Nothing is stored for ``sequential``, ``shuffle`` and ``blocks`` but the reserve (8 bytes a reserved row), the shards and one
chunk of rows; a callable's array is kept for two epochs (8 bytes a row each). Reserved rows are in no order. Every rank computes the same
order and takes its part of it.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from typing import Any, Literal, Protocol, TypeAlias

import numpy as np

from trainwarden.orderkey import OF_ROWS, OF_SHARDS, key, reserve_size

from .permutation import Indices, Permutation
from .ranges import RangeSet
from .reserve import Reserve
from .shards import Shards

OrderName = Literal["sequential", "shuffle", "blocks"]
#: ``(seed, epoch) -> array of rows``; it must return the same rows whenever it is called with the same two numbers.
OrderFunction: TypeAlias = Callable[[int, int], Any]

ORDERS: tuple[OrderName, ...] = ("sequential", "shuffle", "blocks")
#: Rows are computed this many at a time: about 1 ms, once in so many samples.
_CHUNK = 8192


class Order(Protocol):
    """A global order. ``name`` is one of :data:`ORDERS` or ``callable``."""

    name: str

    def size(self, epoch: int) -> int:
        """Return the number of positions of an epoch."""

    def rows(self, epoch: int, positions: Indices) -> Indices:
        """Return the row of the data set at each position, in any order and with repetition."""

    def extent(self, epoch: int, shard: int) -> tuple[int, int] | None:
        """Return the positions ``[first, end)`` that a shard fills, or None where they are not contiguous or none."""

    def count(self, epoch: int, rows: RangeSet) -> int:
        """Return how many positions of an epoch hold one of these rows."""


def make_order(
    order: str | OrderFunction, rows: int, *, shards: Shards | None, seed: int, share: float, batch: int
) -> tuple[Order, Reserve]:
    """Build an order of a data set of ``rows`` rows and the reserve held back from it.

    Raises:
        TypeError, ValueError: the order is unknown, blocks have no shards, a callable returns no rows of the data set.
    """
    if callable(order):
        # The reserve comes from what the function would have trained on: it may leave held-out rows out on purpose.
        known = np.unique(_checked(order(seed, 0), rows, 0))
        reserve = Reserve(known, reserve_size(known.size, share, batch), seed)
        return _CallableOrder(order, rows, reserve.rows, shards, seed), reserve
    if order not in ORDERS:
        raise ValueError(f"order: {order!r} is none of {', '.join(ORDERS)}, nor a function (seed, epoch) -> rows")
    if order == "blocks":
        if shards is None or not len(shards):
            raise ValueError("order: blocks need shards: pass shards=[(name, first_row, end_row), …]")
        spans = [(shard.first, shard.end) for shard in shards.all]
        covered = sum(end - first for first, end in spans)
        candidates: Indices | int = rows
        if covered < rows:
            candidates = np.concatenate([np.arange(first, end) for first, end in sorted(spans)])
        reserve = Reserve(candidates, reserve_size(covered, share, batch), seed)
    else:
        spans = [(0, rows)]
        reserve = Reserve(rows, reserve_size(rows, share, batch), seed)
    return _SegmentOrder(order, spans, reserve.rows, shards, seed), reserve


class _SegmentOrder:
    """Segments of rows one after the other (in their own or in shuffled order), each read forward or shuffled.

    One segment read forward is ``sequential``, one shuffled is ``shuffle``, one a shard, all shuffled, is ``blocks``.
    A row's place among those not reserved is found by counting the reserved rows before it.
    """

    def __init__(
        self, name: str, spans: list[tuple[int, int]], reserved: Indices, shards: Shards | None, seed: int
    ) -> None:
        self.name = name
        self._reserved = reserved
        self._before = reserved - np.arange(reserved.size)  # how many rows that are kept lie before each reserved one
        self._firsts = self._place(np.array([first for first, _ in spans], dtype=np.int64))
        self._sizes = self._place(np.array([end for _, end in spans], dtype=np.int64)) - self._firsts
        self._shards = shards
        self._seed = seed
        self._layouts: OrderedDict[int, tuple[Indices, Indices]] = OrderedDict()
        self._chunks: OrderedDict[tuple[int, int], Indices] = OrderedDict()

    def size(self, epoch: int) -> int:
        return int(self._sizes.sum())

    def rows(self, epoch: int, positions: Indices) -> Indices:
        if not positions.size:
            return positions
        first, last = int(positions.min()) // _CHUNK, int(positions.max()) // _CHUNK
        if first == last:
            return self._chunk(epoch, first)[positions - first * _CHUNK]
        if last - first > 1 or positions.size > 2 * _CHUNK:
            return self._compute(epoch, positions)
        both = np.concatenate((self._chunk(epoch, first), self._chunk(epoch, last)))
        return both[positions - first * _CHUNK]

    def extent(self, epoch: int, shard: int) -> tuple[int, int] | None:
        if self._shards is None or self.name == "shuffle":
            return None
        if self.name == "blocks":
            sequence, starts = self._layout(epoch)
            slot = int(np.flatnonzero(sequence == shard)[0])
            first = int(starts[slot])
            end = first + int(self._sizes[shard])
        else:
            named = self._shards.all[shard]
            first, end = (int(place) for place in self._place(np.array([named.first, named.end])))
        return (first, end) if first < end else None

    def count(self, epoch: int, rows: RangeSet) -> int:
        bounds = np.array(rows.ranges, dtype=np.int64).reshape(-1, 2)
        return int((self._place(bounds[:, 1]) - self._place(bounds[:, 0])).sum())

    def _place(self, rows: Indices) -> Indices:
        """Count the rows before each row that are not reserved."""
        return rows - np.searchsorted(self._reserved, rows, side="left")

    def _layout(self, epoch: int) -> tuple[Indices, Indices]:
        """Return the segments in the epoch's order, and the position at which each begins."""
        layout = self._layouts.get(epoch)
        if layout is None:
            sequence = np.arange(self._sizes.size)
            if self.name == "blocks":
                sequence = Permutation(sequence.size, key(self._seed, OF_SHARDS, epoch))(sequence)
            ends = np.cumsum(self._sizes[sequence])
            layout = (sequence, ends - self._sizes[sequence])
            _keep(self._layouts, epoch, layout)
        return layout

    def _chunk(self, epoch: int, number: int) -> Indices:
        chunk = self._chunks.get((epoch, number))
        if chunk is None:
            end = min((number + 1) * _CHUNK, self.size(epoch))
            chunk = self._compute(epoch, np.arange(number * _CHUNK, end))
            _keep(self._chunks, (epoch, number), chunk)
        return chunk

    def _compute(self, epoch: int, positions: Indices) -> Indices:
        sequence, starts = self._layout(epoch)
        slots = np.searchsorted(starts, positions, side="right") - 1
        offsets = positions - starts[slots]
        segments = sequence[slots]
        if self.name != "sequential":
            for segment in np.unique(segments):
                here = segments == segment
                shuffle = Permutation(int(self._sizes[segment]), key(self._seed, OF_ROWS, epoch, int(segment)))
                offsets[here] = shuffle(offsets[here])
        places = self._firsts[segments] + offsets
        rows: Indices = places + np.searchsorted(self._before, places, side="right")
        return rows


class _CallableOrder:
    """The order that a function of (seed, epoch) gives, without the reserved rows."""

    name = "callable"

    def __init__(self, function: OrderFunction, rows: int, reserved: Indices, shards: Shards | None, seed: int) -> None:
        self._function = function
        self._total = rows
        self._reserved = reserved
        self._shards = shards
        self._seed = seed
        self._epochs: OrderedDict[int, Indices] = OrderedDict()
        self._extents: OrderedDict[int, dict[int, tuple[int, int]]] = OrderedDict()

    def size(self, epoch: int) -> int:
        return int(self._all(epoch).size)

    def rows(self, epoch: int, positions: Indices) -> Indices:
        return self._all(epoch)[positions]

    def extent(self, epoch: int, shard: int) -> tuple[int, int] | None:
        extents = self._extents.get(epoch)
        if extents is None:
            extents = self._contiguous(epoch)
            _keep(self._extents, epoch, extents)
        return extents.get(shard)

    def count(self, epoch: int, rows: RangeSet) -> int:
        return int(np.count_nonzero(rows.holds(self._all(epoch))))

    def _all(self, epoch: int) -> Indices:
        found = self._epochs.get(epoch)
        if found is None:
            given = _checked(self._function(self._seed, epoch), self._total, epoch)
            found = given[~np.isin(given, self._reserved)] if self._reserved.size else given
            _keep(self._epochs, epoch, found)
        return found

    def _contiguous(self, epoch: int) -> dict[int, tuple[int, int]]:
        if self._shards is None:
            return {}
        shard_of = self._shards.of(self._all(epoch))
        changes = np.flatnonzero(np.diff(shard_of)) + 1
        firsts = np.concatenate(([0], changes)).astype(np.int64)
        ends = np.concatenate((changes, [shard_of.size])).astype(np.int64)
        found: dict[int, tuple[int, int]] = {}
        broken: set[int] = set()
        for first, end in zip(firsts, ends, strict=True):
            shard = int(shard_of[first]) if shard_of.size else -1
            if shard in found or shard < 0:
                broken.add(shard)
            found[shard] = (int(first), int(end))
        return {shard: span for shard, span in found.items() if shard not in broken}


def _checked(given: Any, rows: int, epoch: int) -> Indices:
    found = np.asarray(given)
    if found.ndim != 1 or found.dtype.kind not in "iu" or not found.size:
        raise ValueError(
            f"order: the function returned {found.dtype} of shape {found.shape} for epoch {epoch}; it must return a "
            "non-empty one-dimensional array of row numbers"
        )
    found = found.astype(np.int64)
    if found.min() < 0 or found.max() >= rows:
        raise ValueError(
            f"order: the function returned rows {found.min()} to {found.max()} for epoch {epoch}; the data set has {rows}"
        )
    return found


def _keep(cache: OrderedDict[Any, Any], name: Any, value: Any) -> None:
    """Remember a value; a cache holds the two newest (a pass and the one that is prefetched behind it)."""
    cache[name] = value
    while len(cache) > 2:
        cache.popitem(last=False)
