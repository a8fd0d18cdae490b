"""Trend of a window: ``slope``, ``slope_t``, ``delta``.

Warm-up: a window 20 % full with two values (three for ``slope_t``). State: none beside the history. Cost: O(N) a record,
vectorised.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from trainwarden.rules.core.block import Floats, Ints
from trainwarden.rules.core.language.operator import Function, Operator, Type
from trainwarden.rules.core.language.series import Frame, Series
from trainwarden.rules.core.language.windows import View, over_windows, side_by_side

# Values that differ by less than this share of their size differ by rounding alone.
_ROUNDING = 1e-12


def line(steps: Ints, values: Floats) -> tuple[float, float]:
    """Return the least-squares slope per step and its t statistic.

    The t statistic takes the residuals as independent. Where they are not (an averaged log), it is too large. A
    perfect line has an infinite one, a constant has 0.
    """
    x = (steps - steps[-1]).astype(float)
    x = x - float(x.sum()) / len(x)
    y = values - float(values.sum()) / len(values)
    across = float((x * x).sum())
    slope = float((x * y).sum()) / across
    size = max(abs(float(values.max())), abs(float(values.min())))
    if abs(slope) * float(steps[-1] - steps[0]) <= _ROUNDING * size:
        return 0.0, 0.0
    if len(x) < 3:
        return slope, math.nan
    rest = y - slope * x
    error = math.sqrt(float((rest * rest).sum()) / (len(x) - 2))
    if error <= _ROUNDING * size:
        return slope, math.copysign(math.inf, slope)
    return slope, slope * math.sqrt(across) / error


def lines(steps: Ints, values: Floats, first: int, count: int, size: int) -> tuple[Floats, Floats]:
    """Return what :func:`line` gives for ``count`` windows, each beginning one value after the one before."""
    slopes, certainties = np.empty(count), np.empty(count)
    gaps = np.diff(steps[first : first + count + size - 1])
    if size < 3 or (gaps != gaps[0]).any():
        for place in range(count):
            own = slice(first + place, first + place + size)
            slopes[place], certainties[place] = line(steps[own], values[own])
        return slopes, certainties
    x = (steps[first : first + size] - steps[first + size - 1]).astype(float)
    x = x - float(x.sum()) / size
    across = float((x * x).sum())
    for part, windows in side_by_side(values, first, count, size):
        y = windows - (windows.sum(axis=1) / size)[:, None]
        slope = (x * y).sum(axis=1) / across
        largest = np.maximum(np.abs(windows.max(axis=1)), np.abs(windows.min(axis=1)))
        y -= slope[:, None] * x
        y *= y
        error = np.sqrt(y.sum(axis=1) / (size - 2))
        certain = np.where(error <= _ROUNDING * largest, np.copysign(np.inf, slope), slope * math.sqrt(across) / error)
        flat = np.abs(slope) * float(gaps[0] * (size - 1)) <= _ROUNDING * largest
        slopes[part], certainties[part] = np.where(flat, 0.0, slope), np.where(flat, 0.0, certain)
    return slopes, certainties


class Slope(Operator):
    """``slope(x[N])``: the least-squares slope per step."""

    __slots__ = ()

    lazy = sleeps = True
    cost = 25

    def feed(self, frame: Frame, inputs: Sequence[Any]) -> Series:
        """Return the slope of each row's window."""
        view: View = inputs[0]
        steps, values = view.steps, view.values
        return over_windows(
            frame,
            view,
            2,
            lambda low, high: line(steps[low:high], values[low:high])[0],
            lambda first, count, size: lines(steps, values, first, count, size)[0],
        )


class SlopeT(Operator):
    """``slope_t(x[N])``: the slope over its standard error; beyond 2 or so a trend is more than noise."""

    __slots__ = ()

    lazy = sleeps = True
    cost = 25

    def feed(self, frame: Frame, inputs: Sequence[Any]) -> Series:
        """Return the t statistic of each row's window."""
        view: View = inputs[0]
        steps, values = view.steps, view.values
        return over_windows(
            frame,
            view,
            3,
            lambda low, high: line(steps[low:high], values[low:high])[1],
            lambda first, count, size: lines(steps, values, first, count, size)[1],
        )


class Delta(Operator):
    """``delta(x[N])``: the window's last measured value minus its first."""

    __slots__ = ()

    lazy = sleeps = True
    cost = 2

    def feed(self, frame: Frame, inputs: Sequence[Any]) -> Series:
        """Return the difference over each row's window."""
        view: View = inputs[0]

        def slide(first: int, count: int, size: int) -> Floats:
            found: Floats = view.values[first + size - 1 :][:count] - view.values[first : first + count]
            return found

        return over_windows(frame, view, 2, lambda low, high: float(view.values[high - 1] - view.values[low]), slide)


FUNCTIONS = (
    Function("slope", (Type.WINDOW,), Type.NUMBER, lambda of, settings: Slope()),
    Function("slope_t", (Type.WINDOW,), Type.NUMBER, lambda of, settings: SlopeT()),
    Function("delta", (Type.WINDOW,), Type.NUMBER, lambda of, settings: Delta()),
)
