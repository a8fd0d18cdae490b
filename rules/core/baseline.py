"""What a signal usually is: robust level and noise of a stretch of values.

Only for evidence and judgement inside an incident, on values from before its onset. Detection is the rules' business.
"""

from __future__ import annotations

import numpy as np
from msgspec import Struct

from .block import Bools, Floats

#: Scale that makes the median absolute deviation of a normal sample its standard deviation.
MAD_TO_SD = 1.4826
#: Fewer values than this say nothing about what is usual.
ENOUGH = 10


class Baseline(Struct, frozen=True):
    """Median and robust noise (one standard deviation, never zero by quantisation alone) of ``n`` finite values."""

    median: float
    noise: float
    n: int


def quantum(values: Floats) -> float:
    """Return the step of a quantised series (a loss logged in bf16 has a few distinct values), or 0.

    Source: case B01, 11 distinct values 2^-7 apart.
    """
    distinct = np.unique(values)
    if len(distinct) < 2 or len(distinct) * 4 > len(values):
        return 0.0
    return float(np.min(np.diff(distinct)))


def noise_of(residuals: Floats, values: Floats) -> float:
    """Return the robust standard deviation of ``residuals``, at least half a quantum of ``values``."""
    spread = MAD_TO_SD * float(np.median(np.abs(residuals - np.median(residuals))))
    return max(spread, quantum(values) / 2)


def baseline(values: Floats) -> Baseline | None:
    """Return the baseline of the finite values, or None where there are too few."""
    finite = values[np.isfinite(values)]
    if len(finite) < ENOUGH:
        return None
    return Baseline(float(np.median(finite)), noise_of(finite, finite), len(finite))


def above(values: Floats, usual: Baseline | None, sds: float, factor: float) -> Bools:
    """Say where values lie above both ``median + sds * noise`` and ``factor * median``; a non-finite value does."""
    if usual is None:
        return ~np.isfinite(values)
    limit = max(usual.median + sds * usual.noise, factor * usual.median)
    with np.errstate(invalid="ignore"):
        return (values > limit) | ~np.isfinite(values)


def below(values: Floats, usual: Baseline | None, sds: float, factor: float) -> Bools:
    """Say where values lie below both ``median - sds * noise`` and ``factor * median``."""
    if usual is None:
        return np.zeros(len(values), dtype=np.bool_)
    limit = min(usual.median - sds * usual.noise, factor * usual.median)
    with np.errstate(invalid="ignore"):
        return values < limit
