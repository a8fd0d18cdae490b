"""Order statistics over a window: ``median``, ``mad``, ``quantile``, ``min``, ``max``.

Warm-up: a window 20 % full. State: none beside the history (the sorted window is rebuilt from it). Cost: O(log N) to search
and a memory move of N numbers a record.
"""

from __future__ import annotations

import math
from bisect import bisect_left, insort
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from trainwarden.rules.core.block import Floats
from trainwarden.rules.core.language.operator import Function, Operator, Setting, Settings, Type
from trainwarden.rules.core.language.series import Frame, Series
from trainwarden.rules.core.language.sorted_values import deviation_of, median_of
from trainwarden.rules.core.language.windows import View, over_windows, side_by_side

#: Windows up to this size are sorted anew rather than kept sorted, where there are at least FEW of them.
SHORT, FEW = 200, 16


class Ordered(Operator):
    """Keep the window's values sorted while it slides, and ask ``reckon`` of the sorted list.

    Many neighbouring short windows are sorted at once instead; ``reckon_rows`` is asked of the matrix of them.
    A statistic that is one place of the list, or lies between two, says which of a list of some size: ``place(size)`` is the lower one
    and the share of the upper one.
    """

    __slots__ = ("_at", "_high", "_low", "_ordered", "_place", "_reckon", "_reckon_rows")

    lazy = sleeps = True
    cost = 20

    def __init__(
        self,
        reckon: Callable[[list[float]], float],
        reckon_rows: Callable[[Floats], Floats],
        place: Callable[[int], tuple[int, float]] | None = None,
    ) -> None:
        self._reckon = reckon
        self._reckon_rows = reckon_rows
        self._place = place
        self._ordered: list[float] = []
        self._low = self._high = 0
        self._at: int | None = None  # the step up to which the list is that of the last window

    def feed(self, frame: Frame, inputs: Sequence[Any]) -> Series:
        """Return the statistic of each row's window."""
        view: View = inputs[0]
        self._low, self._high = view.before
        if self._at is None or self._at != view.since:
            self._low = self._high = 0  # the first window is sorted anew
            self._ordered = []

        def reckon(low: int, high: int) -> float:
            self._slide(view, low, high)
            return self._reckon(self._ordered)

        def slide(first: int, count: int, size: int) -> Floats:
            found = np.empty(count)
            if size <= SHORT and count >= FEW:
                for part, windows in side_by_side(view.values, first, count, size):
                    found[part] = self._reckon_rows(np.sort(windows, axis=1))
                return found
            self._slide(view, first, first + size)
            found[0] = self._reckon(self._ordered)
            given = view.values[first : first + count + size - 1].tolist()
            ordered = self._ordered
            below, share = (0, 0.0) if self._place is None else self._place(size)
            numbers = []
            for old, new in zip(given[: count - 1], given[size:], strict=True):
                if old != new:
                    del ordered[bisect_left(ordered, old)]
                    insort(ordered, new)
                if self._place is None:
                    numbers.append(self._reckon(ordered))
                elif share == 0:
                    numbers.append(ordered[below])
                else:
                    numbers.append((1 - share) * ordered[below] + share * ordered[below + 1])
            found[1:] = numbers
            self._low, self._high = first + count - 1, first + count - 1 + size
            return found

        found = over_windows(frame, view, 1, reckon, slide)
        self._slide(view, *view.last)
        self._at = frame.steps[-1]
        return found

    def bounds(self, frame: Frame, inputs: Sequence[Any]) -> tuple[float, float] | None:
        """Return the smallest and the largest value of all windows, for what lies between values of the window."""
        return inputs[0].bounds() if self._place is not None else None

    def _slide(self, view: View, low: int, high: int) -> None:
        if low == self._low and high == self._high:
            return
        if low >= self._high or high - self._high > SHORT:
            self._ordered = np.sort(view.values[low:high]).tolist()
        else:
            for value in view.values[self._low : low].tolist():
                del self._ordered[bisect_left(self._ordered, value)]
            for value in view.values[self._high : high].tolist():
                insort(self._ordered, value)
        self._low, self._high = low, high


class Extreme(Operator):
    """The smallest or largest value of each window."""

    __slots__ = ("_of",)

    lazy = sleeps = True
    cost = 3

    def __init__(self, of: np.ufunc) -> None:
        self._of = of

    def feed(self, frame: Frame, inputs: Sequence[Any]) -> Series:
        """Return the extreme of each row's window."""
        view: View = inputs[0]

        def slide(first: int, count: int, size: int) -> Floats:
            if count <= size:
                # What all windows hold, then what each has before and behind it.
                inner = self._of.reduce(view.values[first + count - 1 : first + size])
                found = np.full(count, inner)
                if count > 1:
                    before = view.values[first : first + count - 1]
                    behind = view.values[first + size : first + size + count - 1]
                    found[:-1] = self._of(inner, self._of.accumulate(before[::-1])[::-1])
                    found[1:] = self._of(found[1:], self._of.accumulate(behind))
                return found
            # Each window is the end of one stretch of its size and the beginning of the next (van Herk, Gil and Werman).
            stretches = -(-(count + size - 1) // size)
            given = view.values[first : first + count + size - 1]
            line = np.full(stretches * size, given[-1])
            line[: len(given)] = given
            table = line.reshape(stretches, size)
            ends = self._of.accumulate(table[:, ::-1], axis=1)[:, ::-1].reshape(-1)
            beginnings = self._of.accumulate(table, axis=1).reshape(-1)
            return self._of(ends[:count], beginnings[size - 1 : size - 1 + count])  # type: ignore[no-any-return]

        return over_windows(frame, view, 1, lambda low, high: float(self._of.reduce(view.values[low:high])), slide)

    def bounds(self, frame: Frame, inputs: Sequence[Any]) -> tuple[float, float] | None:
        """Return the smallest and the largest value of all windows."""
        found: tuple[float, float] | None = inputs[0].bounds()
        return found


def _medians(ordered: Floats) -> Floats:
    """Return the medians of sorted rows, as ``median_of``."""
    half, odd = divmod(ordered.shape[1], 2)
    return ordered[:, half] if odd else 0.5 * ordered[:, half - 1] + 0.5 * ordered[:, half]


def _deviations(ordered: Floats) -> Floats:
    """Return the median absolute deviations of sorted rows, as ``deviation_of``."""
    return _medians(np.sort(np.abs(ordered - _medians(ordered)[:, None]), axis=1))


def median(of: Type, settings: Settings) -> Operator:
    """``median(x[N])``: the middle value, or the mean of the two in the middle."""
    return Ordered(median_of, _medians, lambda size: ((size - 1) // 2, 0.0 if size % 2 else 0.5))


def deviation(of: Type, settings: Settings) -> Operator:
    """``mad(x[N])``: median of the distances from the median; times 1.4826 it estimates a standard deviation."""
    return Ordered(lambda ordered: deviation_of(ordered, median_of(ordered)), _deviations)


def quantile(of: Type, settings: Settings) -> Operator:
    """``quantile(x[N], q=0.99)``: the value below which a share q lies, linear between neighbours."""
    share = settings["q"]

    def place(size: int) -> tuple[int, float]:
        exact = share * (size - 1)
        below = math.floor(exact)
        return below, exact - below

    def reckon(ordered: list[float]) -> float:
        below, part = place(len(ordered))
        if part == 0:
            return ordered[below]
        return (1 - part) * ordered[below] + part * ordered[below + 1]

    def reckon_rows(ordered: Floats) -> Floats:
        below, part = place(ordered.shape[1])
        if part == 0:
            return ordered[:, below]
        found: Floats = (1 - part) * ordered[:, below] + part * ordered[:, below + 1]
        return found

    return Ordered(reckon, reckon_rows, place)


def smallest(of: Type, settings: Settings) -> Operator:
    """``min(x[N])``: the smallest value."""
    return Extreme(np.minimum)


def largest(of: Type, settings: Settings) -> Operator:
    """``max(x[N])``: the largest value."""
    return Extreme(np.maximum)


FUNCTIONS = (
    Function("median", (Type.WINDOW,), Type.NUMBER, median),
    Function("mad", (Type.WINDOW,), Type.NUMBER, deviation),
    Function("quantile", (Type.WINDOW,), Type.NUMBER, quantile, (Setting("q", None, 0.0, 1.0),)),
    Function("min", (Type.WINDOW,), Type.NUMBER, smallest),
    Function("max", (Type.WINDOW,), Type.NUMBER, largest),
)
