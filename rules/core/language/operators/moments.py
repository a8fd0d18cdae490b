"""Moments of a window: ``mean`` and ``stddev``.

Each is reckoned anew from the window's values: a running sum would drift, and would not survive a restart to the last bit.
Warm-up: a window 20 % full, and two values for ``stddev``. State: none beside the history. Cost: O(N) a record, vectorised.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from trainwarden.rules.core.block import Floats
from trainwarden.rules.core.language.operator import Function, Operator, Type
from trainwarden.rules.core.language.series import Frame, Series
from trainwarden.rules.core.language.windows import View, over_windows, side_by_side

# A deviation below this share of the values may be rounding alone.
_ROUNDING = 1e-9


def mean_of(values: Floats) -> float:
    """Return the arithmetic mean."""
    return float(values.sum()) / len(values)


def deviation_of(values: Floats) -> float:
    """Return the sample standard deviation (n - 1) of at least two values; exactly 0 where all are equal."""
    if values[0] == values[-1] and (values == values[0]).all():
        return 0.0
    away = values - mean_of(values)
    return math.sqrt(float((away * away).sum()) / (len(values) - 1))


class Mean(Operator):
    """``mean(x[N])``: the mean of the window's measured values; each record counts once."""

    __slots__ = ()

    lazy = sleeps = True
    cost = 4

    def feed(self, frame: Frame, inputs: Sequence[Any]) -> Series:
        """Return the mean of each row's window."""
        view: View = inputs[0]

        def slide(first: int, count: int, size: int) -> Floats:
            found = np.empty(count)
            for part, windows in side_by_side(view.values, first, count, size):
                found[part] = windows.sum(axis=1) / size
            return found

        return over_windows(frame, view, 1, lambda low, high: mean_of(view.values[low:high]), slide)


class StandardDeviation(Operator):
    """``stddev(x[N])``: the sample standard deviation of the window's measured values."""

    __slots__ = ()

    lazy = sleeps = True
    cost = 15

    def feed(self, frame: Frame, inputs: Sequence[Any]) -> Series:
        """Return the standard deviation of each row's window."""
        view: View = inputs[0]

        def slide(first: int, count: int, size: int) -> Floats:
            found = np.empty(count)
            for part, windows in side_by_side(view.values, first, count, size):
                away = windows - (windows.sum(axis=1) / size)[:, None]
                away *= away
                found[part] = np.sqrt(away.sum(axis=1) / (size - 1))
            # Equal values: exactly 0, and not what rounding left of their mean.
            for place in np.flatnonzero(found <= _ROUNDING * np.abs(view.values[first : first + count])).tolist():
                found[place] = deviation_of(view.values[first + place : first + place + size])
            return found

        return over_windows(frame, view, 2, lambda low, high: deviation_of(view.values[low:high]), slide)


FUNCTIONS = (
    Function("mean", (Type.WINDOW,), Type.NUMBER, lambda of, settings: Mean()),
    Function("stddev", (Type.WINDOW,), Type.NUMBER, lambda of, settings: StandardDeviation()),
)
