"""A shuffled order that is computed, not stored: the row at a position from the key and the position alone.

An alternating Feistel network over the smallest power of two that holds the range, with cycle walking (Black and
Rogaway, "Ciphers with arbitrary finite domains", CT-RSA 2002) for the numbers beyond it. It costs no memory however
long the data set is, and it does not change with the version of numpy, whose generators promise no stable stream
(NEP 19): a resumed run finds the order of its checkpoint after any upgrade.
"""

from __future__ import annotations

from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from trainwarden.orderkey import ROUNDS, key

Indices: TypeAlias = npt.NDArray[np.int64]


class Permutation:
    """A pseudo-random one-to-one mapping of ``range(size)`` to itself, fixed by ``key``.

    Calling it maps an array of positions, each in ``range(size)``, to as many values. It holds a handful of integers.
    """

    __slots__ = ("_high_bits", "_keys", "_low_bits", "size")

    def __init__(self, size: int, key_of: int) -> None:
        if size < 1:
            raise ValueError(f"a permutation of {size} elements: it needs at least one")
        bits = max(2, (size - 1).bit_length())
        self.size = size
        self._high_bits = bits // 2
        self._low_bits = bits - self._high_bits
        self._keys = [np.uint64(key(key_of, number)) for number in range(ROUNDS)]

    def __call__(self, positions: npt.ArrayLike) -> Indices:
        """Map positions to values, both int64, of the same shape.

        Raises:
            IndexError: a position lies outside ``range(size)``.
        """
        asked = np.asarray(positions, dtype=np.int64)
        if asked.size and (asked.min() < 0 or asked.max() >= self.size):
            raise IndexError(f"positions {asked.min()} to {asked.max()} of a permutation of {self.size}")
        values = self._network(asked.astype(np.uint64))
        beyond = values >= self.size
        while beyond.any():
            values[beyond] = self._network(values[beyond])
            beyond = values >= self.size
        return values.astype(np.int64)

    def _network(self, values: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
        low_bits = np.uint64(self._low_bits)
        low_mask = np.uint64((1 << self._low_bits) - 1)
        high_mask = np.uint64((1 << self._high_bits) - 1)
        high, low = values >> low_bits, values & low_mask
        for number, round_key in enumerate(self._keys):
            if number % 2:
                low ^= _mix(high, round_key) & low_mask
            else:
                high ^= _mix(low, round_key) & high_mask
        joined: npt.NDArray[np.uint64] = (high << low_bits) | low
        return joined


def _mix(half: npt.NDArray[np.uint64], round_key: np.uint64) -> npt.NDArray[np.uint64]:
    mixed: npt.NDArray[np.uint64] = (half ^ round_key) + np.uint64(0x9E3779B97F4A7C15)
    mixed = (mixed ^ (mixed >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    mixed = (mixed ^ (mixed >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    mixed ^= mixed >> np.uint64(31)
    return mixed
