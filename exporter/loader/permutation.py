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

Indices: TypeAlias = npt.NDArray[np.int64]

_WORD = (1 << 64) - 1
#: Rounds of the network: four suffice to be pseudo-random (Luby and Rackoff 1988); twice that for small halves.
_ROUNDS = 8


def key(*words: int) -> int:
    """Mix any whole numbers (seed, epoch, a purpose) into a key of 64 bits; their order counts."""
    mixed = 0x9E3779B97F4A7C15
    for word in words:
        mixed = _finish((mixed + (word & _WORD) + 0x9E3779B97F4A7C15) & _WORD)
        mixed = _finish(mixed ^ ((word >> 64) & _WORD))  # a negative or a long seed is another seed than its low half
    return mixed


def _finish(word: int) -> int:
    """Finalise as splitmix64 does (Steele, Lea and Flood 2014)."""
    word = ((word ^ (word >> 30)) * 0xBF58476D1CE4E5B9) & _WORD
    word = ((word ^ (word >> 27)) * 0x94D049BB133111EB) & _WORD
    return word ^ (word >> 31)


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
        self._keys = [np.uint64(key(key_of, number)) for number in range(_ROUNDS)]

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
