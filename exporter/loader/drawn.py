"""The rows that a library's own sampler draws in an epoch, and which stand in for those that must not be trained on.

For samplers that are a function of a seed and the epoch, or read forward. Every position keeps its place: what is skipped or
excluded is replaced, so that every other step keeps its batch and an epoch its length. Stand-ins are drawn from a share of the rows that
stays in the order as well; never from the rows that are skipped. Pure: the same arguments give the same rows.
"""

from __future__ import annotations

from collections import OrderedDict

import numpy as np
import torch

from trainwarden.orderkey import reserve_size
from trainwarden.ranges import within

from .permutation import Indices
from .ranges import Mask, RangeSet, of_positions
from .reserve import Reserve
from .shards import Shards
from .skips import Refusals, Skips, excluded_rows

#: Seed of the choice of stand-ins: the same in every start of every run.
_SEED = 0


class Drawn:
    """The rows at the positions of each epoch of a data set of ``size`` rows.

    ``seed`` is that of Accelerate's ``SeedableRandomSampler``, None for a sequential sampler. ``step`` is the number of
    positions of a step over all ranks. Holds 8 bytes a row for each of the two newest epochs of a shuffled order.
    """

    def __init__(
        self,
        size: int,
        seed: int | None,
        *,
        step: int,
        reserve: float,
        shards: Shards | None,
        dataset: str | None,
        skips: Skips,
    ) -> None:
        self._size = size
        self._seed = seed
        self._shards = shards
        self._orders: OrderedDict[int, Indices] = OrderedDict()
        self._held = Reserve(size, reserve_size(size, reserve, step), _SEED)
        refusals = Refusals()
        excluded = excluded_rows(skips.exclude, dataset, shards, refusals, size)
        self._excluded = RangeSet([span for ranges in excluded.values() for span in ranges.ranges])
        self._skipped = {epoch: RangeSet(skips.in_epoch(epoch)) for epoch in skips.epochs()}
        gone = [
            RangeSet(of_positions(np.sort(self.order(epoch, positions_of(ranges, size)))))
            for epoch, ranges in self._skipped.items()
        ]
        self._held.learn(shards, [self._excluded, *gone])
        able = {"substitute"} if self._held.usable else set()
        if able and dataset is not None and shards is not None:
            able.add("exclude")
        self.can_skip = frozenset(able)
        self.notices: list[str] = []
        if skips and not able:
            why = "no row is left to stand in" if len(self._held) else "reserve=0 leaves no rows to stand in"
            for name, asked in (("skip_samples", skips.skips), ("exclude", skips.exclude)):
                if asked:
                    refusals.add(name, why)
        elif "shift" in {one.mode for one in skips.skips} | {one.mode for one in skips.exclude}:
            self.notices.append("loader: an epoch keeps its length here: what was to be shifted over is substituted")
        self.refused = refusals.reasons

    @property
    def replaces(self) -> bool:
        """Whether any row of any epoch may be replaced."""
        return bool(self.can_skip and (self._skipped or self._excluded))

    def order(self, epoch: int, positions: Indices) -> Indices:
        """Return the rows that the sampler draws at positions of an epoch."""
        if self._seed is None:
            return positions
        if epoch not in self._orders:
            generator = torch.Generator().manual_seed(self._seed + epoch)
            self._orders[epoch] = torch.randperm(self._size, generator=generator).numpy()
            while len(self._orders) > 2:
                self._orders.popitem(last=False)
        return self._orders[epoch][positions]

    def replace(self, epoch: int, positions: Indices, drawn: Indices) -> tuple[Indices, Mask]:
        """Return the rows to read in place of those drawn at some positions, and at which of them that is another row."""
        here = self._excluded.holds(drawn)
        if epoch in self._skipped:
            here = here | self._skipped[epoch].holds(positions)
        if not self.can_skip or not here.any():
            return drawn, np.zeros(drawn.size, dtype=np.bool_)
        of = np.full(int(np.count_nonzero(here)), -1) if self._shards is None else self._shards.of(drawn[here])
        rows = drawn.copy()
        rows[here] = self._held.stand_ins(epoch, positions[here], of)
        return rows, here

    def rows(self, epoch: int, positions: Indices) -> tuple[Indices, Indices, Mask | None]:
        """Return the row read at each position, the row that the order has there, and where they differ."""
        if positions.size and int(positions.max()) >= self._size:
            raise IndexError(f"an epoch has {self._size} positions")
        meant = self.order(epoch, positions)
        rows, replaced = self.replace(epoch, positions, meant)
        return rows, meant, replaced


def positions_of(ranges: RangeSet, size: int) -> Indices:
    """Return the positions of some ranges that an epoch of ``size`` samples has."""
    parts = [np.arange(first, end) for first, end in within(ranges.ranges, 0, size)]
    return np.concatenate(parts) if parts else np.zeros(0, dtype=np.int64)
