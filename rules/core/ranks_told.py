"""What the records of one rank say of all of them (``ranks``), where the records of the others are not read.

Of each quantity there are the smallest, the largest, the sum, whose was the largest, and how many had one. That is enough to name
one rank that stands out, and to see that a value which all must share is not shared. Vectorised over a block.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from .block import Block, Bools, Floats

#: A loss is its rank's own affair where it lies this many times the distance of the lowest from the others' mean above that mean. Of
#: four healthy ranks (normal losses, simulated) the highest does in 1.5 % of the records, of eight in none of 20,000.
DISTANCES = 15.0
#: The distance counts as at least this share of the others' mean.
FLOOR = 1e-3
#: Ranks from which losses are compared, and from which one norm can be told from the others.
OF_LOSSES, OF_NORMS = 4, 3


@dataclass(frozen=True, slots=True)
class Losses:
    """By row: ``bad`` and ``high`` where the rank in ``whose`` stands out, ``lead`` how far the highest is above the others' mean.

    ``one``: all ranks have the same loss, to a relative ``same``.
    """

    bad: Bools
    high: Bools
    whose: Floats
    lead: Floats
    one: Bools


@dataclass(frozen=True, slots=True)
class Norms:
    """By row: all ranks hold the same norm, or not; and where the rank in ``whose`` is the only one with another."""

    agree: Bools
    differ: Bools
    alone: Bools
    whose: Floats


def losses(block: Block, known: int, same: float) -> Losses | None:
    """Return what the records say of all ranks' losses; None where the losses of all are among the ``known`` ranks' own."""
    told = _told(block, "loss", known)
    if told is None:
        return None
    low, high, total, whose, count = told
    found = block.stats.get(("nonfinite.loss", "sum"))
    bad_ones = np.ones(len(block)) if found is None else np.where(found.present, found.values, 1.0)
    with np.errstate(invalid="ignore", over="ignore"):
        others = (total - high) / np.maximum(count - 1, 1)
        lead = np.where(count >= OF_LOSSES, high - others, np.nan)
        distance = np.maximum(others - low, FLOOR * np.abs(others))
        return Losses(
            bad=~np.isfinite(high) & np.isfinite(low) & (2 * bad_ones <= count),
            high=np.isfinite(high) & (lead > DISTANCES * distance),
            whose=whose,
            lead=lead,
            one=np.isfinite(high) & (high - low < same * np.abs(high)),
        )


def norms(block: Block, known: int, agree: float, differ: float) -> Norms | None:
    """Return what the records say of all ranks' gradient norms; None where those of all are among the ``known`` ranks' own."""
    told = _told(block, "grad_norm", known)
    if told is None:
        return None
    low, high, total, whose, count = told
    finite = np.isfinite(low) & np.isfinite(high)
    with np.errstate(invalid="ignore", over="ignore"):
        others = (total - high) / np.maximum(count - 1, 1)
        return Norms(
            agree=finite & (high - low <= agree * np.abs(high)),
            differ=finite & (high - low > differ * np.abs(high)),
            alone=(others - low <= agree * np.abs(low)) & (count >= OF_NORMS),
            whose=whose,
        )


def _told(block: Block, name: str, known: int) -> tuple[Floats, Floats, Floats, Floats, Floats] | None:
    """Return smallest, largest, sum, whose and how many; NaN at rows where no more ranks had one than are known."""
    counts = block.stats.get((name, "n"))
    if counts is None:
        return None
    used = counts.present & (counts.values > max(known, 1))
    if not used.any():
        return None
    low, high, total, whose, count = (
        np.where(used, block.stats[name, part].values, np.nan) for part in ("min", "max", "sum", "argmax", "n")
    )
    return low, high, total, whose, count
