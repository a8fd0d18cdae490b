"""What flows between operators: one value a row of a block, and whether it is known and freshly measured.

A row's value is *measured* (``known`` and ``fresh``), *not due* (``known`` alone: the last value is used) or *unknown*
(neither). Where a row is unknown its value is NaN, or False for a boolean; nobody changes an array that was handed on.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from msgspec import Struct
from numpy.typing import NDArray

from trainwarden.rules.core.block import Block, Bools, Floats, Ints


class Series(Struct, frozen=True, gc=False):
    """One expression over the ``n`` rows of a block: numbers (float64) or booleans."""

    values: NDArray[Any]  # (n,)
    known: Bools  # (n,)
    fresh: Bools  # (n,)


class Baseline(Series, frozen=True, gc=False):
    """A baseline with the robust spread around it, in the unit of the values."""

    scale: Floats  # (n,)


class Vector(Struct, frozen=True, gc=False):
    """Several series side by side: the members of ``spread(loss by rank)``, each with its number (a rank, an index).

    Over ranks, the last two members are the extremes that a record itself holds, and ``largest`` says at each row whose
    the larger of them is.
    """

    numbers: tuple[float, ...]
    members: tuple[Series, ...]
    largest: Series | None = None


class Frame(Struct, frozen=True, gc=False):
    """The block that is being evaluated, with what most operators ask of it at hand as Python numbers.

    ``everywhere`` and ``nowhere`` are the two plain answers to whether rows are known or fresh: one array each, so that an
    operator tells them by identity and need not look. ``even``: each row is one step and follows the one before.
    """

    block: Block
    step: Ints
    steps: list[int]
    strides: list[int]
    rows: int
    everywhere: Bools
    nowhere: Bools
    even: bool

    @classmethod
    def of(cls, block: Block, like: Frame | None = None) -> Frame:
        """Return the frame of a block. ``like`` is one whose two plain answers it may share, if it has as many rows."""
        steps, strides = block.step.tolist(), block.stride.tolist()
        rows = len(steps)
        even = rows > 0 and steps[-1] - steps[0] == rows - 1 and strides.count(1) == rows
        if like is not None and like.rows == rows:
            everywhere, nowhere = like.everywhere, like.nowhere
        else:
            everywhere, nowhere = np.ones(rows, dtype=np.bool_), np.zeros(rows, dtype=np.bool_)
        return cls(block, block.step, steps, strides, rows, everywhere, nowhere, even)

    def all(self, rows: Bools) -> Bools:
        """Return ``everywhere`` if all rows are set, else the rows themselves."""
        # Of a few bytes this is asked sooner than any function of numpy.
        return self.everywhere if rows is self.everywhere or b"\0" not in rows.tobytes() else rows

    def any(self, rows: Bools) -> bool:
        """Say whether a row is set."""
        return rows is not self.nowhere and b"\1" in rows.tobytes()

    def both(self, one: Bools, other: Bools) -> Bools:
        """Return the rows that are set in both."""
        if one is other or other is self.everywhere or one is self.nowhere:
            return one
        if one is self.everywhere or other is self.nowhere:
            return other
        return one & other

    def either(self, one: Bools, other: Bools) -> Bools:
        """Return the rows that are set in one of the two."""
        if one is other or other is self.nowhere or one is self.everywhere:
            return one
        if one is self.nowhere or other is self.everywhere:
            return other
        return one | other
