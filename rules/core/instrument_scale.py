"""How a signal is written down: in steps that are too coarse, or in another unit than before (design §4.9).

A change of unit is only believed between two starts: within one nobody changes the library that logs. There, no window and no
baseline spans the change, so that naming it is all that is to be done.
"""

from __future__ import annotations

import math

import numpy as np

from .baseline import quantum
from .block import Floats

#: Records after which a loss is known to be coarse, and those of a new start that are compared with the old.
ENOUGH, COMPARED = 200, 20
#: Records after which a few values may show that they are bfloat16's, and how exactly a log prints them.
SOONEST, PRINTED = 60, 5.1e-5
#: Records before a restart that tell the old level, and how exact a factor must be met.
BEFORE, EXACT = 50, 0.01
#: How exact it must be met by the first few values, which are not yet believed.
ABOUT = 0.03
#: Relative noise before and behind may differ by this factor.
AS_NOISY = 3.0
#: What accumulation steps and ranks multiply by, and their roots. Few: with many, any ratio would be near one.
FACTORS = (math.sqrt(2), 2.0, math.sqrt(8), 3.0, 4.0, 6.0, 8.0, math.sqrt(128), 12.0, 16.0, 24.0, 32.0, 48.0, 64.0)


def coarse(losses: Floats) -> float:
    """Return the step of a rounded loss, or 0 where it is finer than its own noise."""
    finite = losses[np.isfinite(losses)]
    return quantum(finite) if len(finite) >= ENOUGH // 2 else 0.0


def rounded(losses: Floats) -> float:
    """Return the step of a loss that bfloat16 rounds and that has taken few values yet, or 0 (case B01).

    All its values must lie on bfloat16's numbers, as exactly as four digits behind the point tell, and the nearest two must be neighbours.
    """
    finite = losses[np.isfinite(losses) & (losses > 0)]
    distinct = np.unique(finite)
    if len(finite) < SOONEST or len(distinct) < 2 or 4 * len(distinct) > len(finite):
        return 0.0
    step = 2.0 ** (math.floor(math.log2(float(distinct[-1]))) - 7)
    off = np.abs(distinct / step - np.round(distinct / step)) * step
    nearest = float(np.min(np.diff(distinct)))
    return step if off.max() <= PRINTED and abs(nearest - step) <= 2 * PRINTED else 0.0


def scaled(now: float, before: float) -> bool:
    """Say whether one level is about an exact multiple of the other, as a change of unit makes it."""
    if not 0 < before < math.inf or not 0 < now < math.inf:
        return False
    size = max(now / before, before / now)
    return min(abs(factor / size - 1) for factor in FACTORS) <= ABOUT


def rescaled(older: Floats, newer: Floats) -> float | None:
    """Return the exact factor between two levels of equal relative noise, or None."""
    older, newer = older[np.isfinite(older)][-BEFORE:], newer[np.isfinite(newer)]
    if len(older) < COMPARED or len(newer) < COMPARED // 2:
        return None
    level, now = float(np.median(older)), float(np.median(newer))
    if level <= 0 or now <= 0:
        return None
    ratio = now / level
    size = max(ratio, 1 / ratio)
    nearest = min(FACTORS, key=lambda factor: abs(factor - size))
    if abs(size / nearest - 1) > EXACT:
        return None
    noise = float(np.median(np.abs(older - level))) / level
    noise_now = float(np.median(np.abs(newer - now))) / now
    if not noise / AS_NOISY <= noise_now <= noise * AS_NOISY:
        return None
    return nearest if ratio > 1 else 1 / nearest
