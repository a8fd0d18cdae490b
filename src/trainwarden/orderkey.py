"""What an epoch's order is computed from, on both sides: the loader that follows it, and the core that asks where rows lie in it.

Whole numbers alone; each side does the arithmetic of arrays itself.
"""

from __future__ import annotations

#: Rounds of the shuffle's network: four suffice to be pseudo-random (Luby and Rackoff 1988); twice that for small halves.
ROUNDS = 8
#: Purposes that a key is mixed with: the order of shards, of rows within a segment, the choice of the reserve.
OF_SHARDS, OF_ROWS, CHOOSING = 0x6F7264657201, 0x6F7264657202, 0x7265736572766531

_WORD = (1 << 64) - 1


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


def reserve_size(rows: int, share: float, batch: int) -> int:
    """Return how many of ``rows`` rows are held back: ``share`` of them, but at least one batch where that is at most 10 %.

    Raises:
        ValueError: the share is not in [0, 0.5].
    """
    if not 0 <= share <= 0.5:
        raise ValueError(f"reserve: {share} is not a share between 0 and 0.5 of the rows")
    if share == 0:
        return 0
    return max(round(share * rows), min(batch, rows // 10))
