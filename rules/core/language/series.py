"""What flows between operators: one value a row of a block, and whether it is known and freshly measured.

A row's value is *measured* (``known`` and ``fresh``), *not due* (``known`` alone: the last value is used) or *unknown*
(neither). Where a row is unknown its value is NaN, or False for a boolean; nobody changes an array that was handed on.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from trainwarden.rules.core.block import Block, Bools, Floats, Ints


@dataclass(frozen=True, slots=True)
class Series:
    """One expression over the ``n`` rows of a block: numbers (float64) or booleans."""

    values: NDArray[Any]  # (n,)
    known: Bools  # (n,)
    fresh: Bools  # (n,)


@dataclass(frozen=True, slots=True)
class Baseline(Series):
    """A baseline with the robust spread around it, in the unit of the values."""

    scale: Floats  # (n,)


@dataclass(frozen=True, slots=True)
class Vector:
    """Several series side by side: the members of ``spread(loss by rank)``, each with its number (a rank, an index).

    Over ranks, the last two members are the extremes that a record itself holds, and ``largest`` says at each row whose
    the larger of them is.
    """

    numbers: tuple[float, ...]
    members: tuple[Series, ...]
    largest: Series | None = None


@dataclass(frozen=True, slots=True)
class View:
    """The windows of a block's rows: row i sees ``values[low[i]:high[i]]``, measured at ``steps[low[i]:high[i]]``.

    ``values`` holds finite measured numbers only. ``full[i]`` says whether the window is full enough to count.
    ``before`` are the bounds that the row before the block saw, for operators that go on from there.
    """

    values: Floats
    steps: Ints
    strides: Ints
    low: Ints  # (n,)
    high: Ints  # (n,)
    before: tuple[int, int]
    full: Bools  # (n,)
    fresh: Bools  # (n,)


@dataclass(frozen=True, slots=True)
class Frame:
    """The block that is being evaluated, with what most operators ask of it at hand as Python numbers."""

    block: Block
    step: Ints
    steps: list[int]
    strides: list[int]
    rows: int

    @classmethod
    def of(cls, block: Block) -> Frame:
        """Return the frame of a block."""
        return cls(block, block.step, block.step.tolist(), block.stride.tolist(), len(block))


def numbers(frame: Frame, known: Bools, fresh: Bools) -> tuple[Floats, Bools, Bools]:
    """Return a fresh array of NaN for a result, with copies of ``known`` and ``fresh`` that may be changed."""
    return np.full(frame.rows, np.nan), known.copy(), fresh.copy()
