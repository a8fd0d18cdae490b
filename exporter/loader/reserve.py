"""Rows held back from the order of every epoch, to stand in for what a plan skips.

Which rows they are is a function of the seed. Which of them stands in for position p is a function of (seed, epoch, p):
two runs that skip different positions put the same row at a position that both skip. A stand-in never comes from
the shard that it replaces a row of (the rest of that shard is suspect, too) while another shard has one, and never is
an excluded row itself; where the function's choice is excluded, its next choice is taken.
"""

from __future__ import annotations

import numpy as np

from trainwarden.orderkey import CHOOSING, key

from .permutation import Indices, Permutation
from .ranges import Mask, RangeSet
from .shards import Shards

_STANDING_IN = 0x7265736572766532
#: How many choices are computed for all open positions at once before the reserve is searched one by one.
_CHOICES = 16


class Reserve:
    """The rows held back from ``candidates``, an ascending array of rows, or from ``range(candidates)``.

    Holds 8 bytes a reserved row. ``rows`` are ascending.
    """

    def __init__(self, candidates: Indices | int, size: int, seed: int) -> None:
        total = candidates if isinstance(candidates, int) else int(candidates.size)
        self._seed = seed
        chosen = np.zeros(0, dtype=np.int64)
        if size:
            chosen = np.sort(Permutation(total, key(seed, CHOOSING))(np.arange(size)))
        self.rows: Indices = chosen if isinstance(candidates, int) else candidates[chosen]
        self._allowed: Mask = np.ones(self.rows.size, dtype=np.bool_)
        self._shard_of: Indices = np.full(self.rows.size, -1, dtype=np.int64)

    def __len__(self) -> int:
        return int(self.rows.size)

    @property
    def usable(self) -> int:
        """How many of the reserved rows may stand in."""
        return int(np.count_nonzero(self._allowed))

    def learn(self, shards: Shards | None, excluded: list[RangeSet]) -> None:
        """Tell the reserve which shards its rows are from and which rows may not be used."""
        if shards is not None:
            self._shard_of = shards.of(self.rows)
        self._allowed = np.ones(self.rows.size, dtype=np.bool_)
        for ranges in excluded:
            self._allowed &= ~ranges.holds(self.rows)

    def stand_ins(self, epoch: int, positions: Indices, shard_of: Indices) -> Indices:
        """Return the row that stands in at each position; ``shard_of`` is the shard of the row that it replaces, or -1.

        Raises:
            ValueError: no reserved row may be used (see :attr:`usable`).
        """
        if not self.usable:
            raise ValueError("no reserved row may stand in")
        rows = np.empty(positions.size, dtype=np.int64)
        open_ = np.arange(positions.size)
        for choice in range(_CHOICES):
            picked = self._choice(epoch, choice, positions[open_])
            good = self._allowed[picked] & self._is_elsewhere(picked, shard_of[open_])
            rows[open_[good]] = self.rows[picked[good]]
            open_ = open_[~good]
            if not open_.size:
                return rows
        for at in open_:
            rows[at] = self.rows[self._search(epoch, positions[at : at + 1], shard_of[at])]
        return rows

    def _choice(self, epoch: int, choice: int, positions: Indices) -> Indices:
        """Map positions to places in the reserve. Each choice is a permutation: neighbours get different rows."""
        order = Permutation(len(self), key(self._seed, _STANDING_IN, epoch, choice))
        return order(positions % len(self))

    def _is_elsewhere(self, picked: Indices, shard_of: Indices) -> Mask:
        elsewhere: Mask = (shard_of < 0) | (self._shard_of[picked] != shard_of)
        return elsewhere

    def _search(self, epoch: int, position: Indices, shard: np.int64) -> int:
        start = int(self._choice(epoch, 0, position)[0])
        places = (np.arange(len(self)) + start) % len(self)
        allowed = places[self._allowed[places]]
        elsewhere = allowed[self._is_elsewhere(allowed, np.full(allowed.size, shard))]
        return int(elsewhere[0] if elsewhere.size else allowed[0])
