"""Order statistics over a window: ``median``, ``mad``, ``quantile``, ``min``, ``max``.

Warm-up: a window 20 % full. State: none beside the history (the sorted window is rebuilt from it). Cost: O(log N) to search
and a memory move of N numbers a record.
"""

from __future__ import annotations

import math
from bisect import bisect_left, insort
from collections.abc import Callable, Sequence
from typing import Any

from trainwarden.rules.core.language.operator import Function, Operator, Setting, Settings, Type
from trainwarden.rules.core.language.series import Frame, Series, View
from trainwarden.rules.core.language.sorted_values import deviation_of, median_of
from trainwarden.rules.core.language.windows import over_windows


class Ordered(Operator):
    """Keep the window's values sorted while it slides, and ask ``reckon`` of the sorted list."""

    __slots__ = ("_high", "_low", "_ordered", "_reckon", "_started")

    def __init__(self, reckon: Callable[[list[float]], float]) -> None:
        self._reckon = reckon
        self._ordered: list[float] = []
        self._low = self._high = 0
        self._started = False

    def feed(self, frame: Frame, inputs: Sequence[Any]) -> Series:
        """Return the statistic of each row's window."""
        view: View = inputs[0]
        self._low, self._high = view.before
        if not self._started:
            self._ordered = sorted(view.values[self._low : self._high].tolist())
            self._started = True

        def reckon(low: int, high: int) -> float:
            self._slide(view, low, high)
            return self._reckon(self._ordered)

        found = over_windows(frame, view, 1, reckon)
        self._slide(view, view.low[-1], view.high[-1])
        return found

    def _slide(self, view: View, low: int, high: int) -> None:
        if low >= self._high:
            self._ordered = sorted(view.values[low:high].tolist())
        else:
            for value in view.values[self._low : low].tolist():
                del self._ordered[bisect_left(self._ordered, value)]
            for value in view.values[self._high : high].tolist():
                insort(self._ordered, value)
        self._low, self._high = low, high


def median(of: Type, settings: Settings) -> Operator:
    """``median(x[N])``: the middle value, or the mean of the two in the middle."""
    return Ordered(median_of)


def deviation(of: Type, settings: Settings) -> Operator:
    """``mad(x[N])``: median of the distances from the median; times 1.4826 it estimates a standard deviation."""
    return Ordered(lambda ordered: deviation_of(ordered, median_of(ordered)))


def quantile(of: Type, settings: Settings) -> Operator:
    """``quantile(x[N], q=0.99)``: the value below which a share q lies, linear between neighbours."""
    share = settings["q"]

    def reckon(ordered: list[float]) -> float:
        place = share * (len(ordered) - 1)
        below = math.floor(place)
        part = place - below
        if part == 0:
            return ordered[below]
        return (1 - part) * ordered[below] + part * ordered[below + 1]

    return Ordered(reckon)


def smallest(of: Type, settings: Settings) -> Operator:
    """``min(x[N])``: the smallest value."""
    return Ordered(lambda ordered: ordered[0])


def largest(of: Type, settings: Settings) -> Operator:
    """``max(x[N])``: the largest value."""
    return Ordered(lambda ordered: ordered[-1])


FUNCTIONS = (
    Function("median", (Type.WINDOW,), Type.NUMBER, median),
    Function("mad", (Type.WINDOW,), Type.NUMBER, deviation),
    Function("quantile", (Type.WINDOW,), Type.NUMBER, quantile, (Setting("q", None, 0.0, 1.0),)),
    Function("min", (Type.WINDOW,), Type.NUMBER, smallest),
    Function("max", (Type.WINDOW,), Type.NUMBER, largest),
)
