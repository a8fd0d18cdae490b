"""Cuts the global order of an epoch into the batches of one rank, carrying out skips and exclusions on the way.

A step takes ``batch size x world`` positions; rank r takes the r-th run of ``batch size`` of them, so that the positions
of a step are one range over all ranks. Pure: the same arguments give the same batches, from any position.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from trainwarden.plan import SkipMode
from trainwarden.ranges import length, within
from trainwarden.record import Ranges, ShardSpan

from .order import Order
from .permutation import Indices
from .ranges import Mask, RangeSet, of_positions
from .reserve import Reserve
from .shards import Shards
from .skips import Skips

#: Positions looked at together while searching for ones that are not skipped by shifting.
_STRIDE = 8192
#: A batch that draws from more shards than this names none: in such an order a shard says nothing about a step.
MOST_SHARDS = 32


@dataclass(frozen=True, slots=True)
class Share:
    """Which part of each step is this rank's, and what happens to the epoch's last, incomplete step.

    ``drop_last`` drops a rank's incomplete batch (DataLoader's), ``drop_uneven`` samples that not every rank would get one of
    (DistributedSampler's); else ranks that lack one are given samples from the beginning of the epoch.
    """

    batch_size: int
    rank: int = 0
    world: int = 1
    drop_last: bool = False
    drop_uneven: bool = False

    def last(self, left: int) -> int:
        """Return how many samples each rank gets of an incomplete step of ``left`` samples."""
        each = left // self.world if self.drop_uneven else -(-left // self.world)
        return 0 if self.drop_last and each < self.batch_size else each


@dataclass(frozen=True, slots=True)
class Batch:
    """One batch of this rank: its rows, and the global position after the step that it belongs to."""

    rows: list[int]
    end: int
    samples: Ranges
    shards: list[ShardSpan]
    substituted: int


class Batches:
    """The batches of one rank in every epoch.

    ``excluded`` are rows by mode. Where the reserve has no usable row, what was to be substituted is shifted.
    """

    def __init__(
        self,
        order: Order,
        reserve: Reserve,
        shards: Shards | None,
        skips: Skips,
        excluded: dict[SkipMode, RangeSet],
        share: Share,
    ) -> None:
        self._order = order
        self._reserve = reserve
        self._shards = shards
        self._share = share
        reserve.learn(shards, list(excluded.values()))
        self.can_substitute = reserve.usable > 0
        self._replaced_rows = excluded.get("substitute", RangeSet([]))
        self._removed_rows = excluded.get("shift", RangeSet([]))
        if not self.can_substitute:
            self._removed_rows = RangeSet([*self._removed_rows.ranges, *self._replaced_rows.ranges])
            self._replaced_rows = RangeSet([])
        removed_by: SkipMode | None = "shift" if self.can_substitute else None
        self._removed = {epoch: RangeSet(skips.in_epoch(epoch, removed_by)) for epoch in skips.epochs()}
        self._replaced = {
            epoch: RangeSet(skips.in_epoch(epoch, "substitute") if self.can_substitute else [])
            for epoch in skips.epochs()
        }
        self._extents: dict[tuple[int, int], tuple[int, int] | None] = {}

    def count(self, epoch: int) -> int:
        """Return the number of batches of a whole epoch."""
        size = self._order.size(epoch)
        removed = self._removed.get(epoch, RangeSet([]))
        if removed and self._removed_rows:
            positions = np.arange(size)
            kept = int(np.count_nonzero(self._is_kept(epoch, positions)))
        else:
            kept = size - length(within(removed.ranges, 0, size))
            if self._removed_rows:
                kept -= self._order.count(epoch, self._removed_rows)
        full, left = divmod(kept, self._share.batch_size * self._share.world)
        return full + (1 if left and self._share.last(left) else 0)

    def begin(self, epoch: int, position: int) -> Iterator[Batch]:
        """Yield the batches of an epoch from a global position on."""
        share = self._share
        need = share.batch_size * share.world
        size = self._order.size(epoch)
        while position < size:
            positions, position = self._take(epoch, position, need)
            each = share.batch_size
            if positions.size < need:
                each = share.last(positions.size)
                if not positions.size or not each:
                    return
                missing = each * share.world - positions.size
                if missing > 0:
                    padding, _ = self._take(epoch, 0, missing)
                    positions = np.concatenate((positions, np.resize(padding, missing)))
            yield self._batch(epoch, positions[share.rank * each : (share.rank + 1) * each], position)

    def _take(self, epoch: int, position: int, need: int) -> tuple[Indices, int]:
        """Return the next ``need`` positions that are not shifted over (fewer at the end), and the position after them."""
        size = self._order.size(epoch)
        removed = self._removed.get(epoch)
        end = min(position + need, size)
        if not self._removed_rows and not (removed and removed.touches(position, end)):
            return np.arange(position, end), end
        found: list[Indices] = []
        while need and position < size:
            positions = np.arange(position, min(position + max(need, _STRIDE), size))
            kept = positions[self._is_kept(epoch, positions)][:need]
            found.append(kept)
            need -= int(kept.size)
            position = int(positions[-1] if need else kept[-1]) + 1
        return (np.concatenate(found) if found else np.zeros(0, dtype=np.int64)), position

    def _is_kept(self, epoch: int, positions: Indices) -> Mask:
        kept: Mask = np.ones(positions.size, dtype=np.bool_)
        removed = self._removed.get(epoch)
        if removed:
            kept &= ~removed.holds(positions)
        if self._removed_rows:
            kept &= ~self._removed_rows.holds(self._order.rows(epoch, positions))
        return kept

    def _batch(self, epoch: int, positions: Indices, end: int) -> Batch:
        rows, meant, replaced = self.rows(epoch, positions)
        shard_of = None if self._shards is None else self._shards.of(meant)
        spans: list[ShardSpan] = []
        if shard_of is not None:
            drawn = slice(None) if replaced is None else ~replaced
            spans = self._spans(epoch, positions[drawn], shard_of[drawn])
        substituted = 0 if replaced is None else int(np.count_nonzero(replaced))
        return Batch(rows.tolist(), end, of_positions(positions), spans, substituted)

    def rows(self, epoch: int, positions: Indices) -> tuple[Indices, Indices, Mask | None]:
        """Return the row read at each position, the row that the order has there, and where they differ (None: nowhere)."""
        meant = self._order.rows(epoch, positions)
        replaced: Mask | None = None
        if self._replaced_rows:
            replaced = self._replaced_rows.holds(meant)
        skipped = self._replaced.get(epoch)
        if skipped:
            here = skipped.holds(positions)
            replaced = here if replaced is None else replaced | here
        if replaced is None or not replaced.any():
            return meant, meant, None
        from_shard = np.full(int(np.count_nonzero(replaced)), -1)
        if self._shards is not None:
            from_shard = self._shards.of(meant[replaced])
        rows = meant.copy()
        rows[replaced] = self._reserve.stand_ins(epoch, positions[replaced], from_shard)
        return rows, meant, replaced

    def _spans(self, epoch: int, positions: Indices, shard_of: Indices) -> list[ShardSpan]:
        assert self._shards is not None
        if not positions.size:
            return []
        by_shard = np.argsort(shard_of, kind="stable")
        numbers, starts = np.unique(shard_of[by_shard], return_index=True)
        if numbers.size > MOST_SHARDS:
            return []
        firsts = np.minimum.reduceat(positions[by_shard], starts).tolist()
        lasts = np.maximum.reduceat(positions[by_shard], starts).tolist()
        spans = []
        for number, first, last in zip(numbers.tolist(), firsts, lasts, strict=True):
            if number >= 0:
                extent = self._extent(epoch, number) or (first, last + 1)
                spans.append(ShardSpan(self._shards.all[number].name, *extent))
        return sorted(spans, key=lambda span: span.first)

    def _extent(self, epoch: int, shard: int) -> tuple[int, int] | None:
        name = (epoch, shard)
        if name not in self._extents:
            if len(self._extents) > 256:
                self._extents.clear()
            self._extents[name] = self._order.extent(epoch, shard)
        return self._extents[name]
