"""The windows that look at the past of an expression, and how a function is reckoned over them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from trainwarden.rules.core.block import Bools, Floats, Ints

from .history import Past
from .operator import Operator
from .series import Frame, Series

#: A window counts once a fifth of its steps (20 %) is covered; kept whole so that no rounding moves the step.
FULL = 5
#: Longest window and offset together, in steps: 0.8 MB of state.
LONGEST = 100_000
#: From so many neighbouring windows it is quicker to reckon them at once.
MANY = 4
# What rounding may put beyond the values between which something is interpolated.
_HAIR = 1e-12
#: Numbers of a matrix of windows: 256 KiB.
MATRIX = 32_768


class View:
    """The windows of a block's rows: row i sees ``values[low[i]:high[i]]``, measured at ``steps[low[i]:high[i]]``.

    ``values`` holds finite measured numbers only. ``full[i]`` says whether the window is full enough to count.
    ``before`` are the bounds that the row before the block saw, and ``since`` is that row's step, for operators that go on from
    there. Where each window lies one value behind the one before, as a rule, ``first`` is where the first one begins and ``size``
    how long they all are; they are full then.
    """

    __slots__ = ("_high", "_low", "_past", "before", "first", "fresh", "full", "rows", "since", "size", "values")

    def __init__(
        self,
        past: Past,
        rows: int,
        full: Bools,
        before: tuple[int, int],
        first: int | None,
        size: int,
        low: Ints | None = None,
        high: Ints | None = None,
    ) -> None:
        self._past = past
        self.values = past.values
        self.fresh = past.fresh
        self.since = past.last_step
        self.rows = rows
        self.full = full
        self.before = before
        self.first = first
        self.size = size
        self._low = low
        self._high = high

    @property
    def low(self) -> Ints:
        """Return where each window begins."""
        if self._low is None:
            assert self.first is not None
            self._low = np.arange(self.first, self.first + self.rows, dtype=np.int64)
        return self._low

    @property
    def high(self) -> Ints:
        """Return where each window ends."""
        if self._high is None:
            self._high = self.low + self.size
        return self._high

    @property
    def last(self) -> tuple[int, int]:
        """Return the bounds of the last window."""
        if self.first is not None:
            low = self.first + self.rows - 1
            return low, low + self.size
        return int(self.low[-1]), int(self.high[-1])

    def bounds(self) -> tuple[float, float] | None:
        """Return the smallest and the largest value in all windows together, if all are full; a hair apart for what is interpolated."""
        if self.first is None or not self.size:
            return None
        values = self.values[self.first : self.first + self.rows - 1 + self.size]
        low, high = float(values.min()), float(values.max())
        return low - _HAIR * abs(low), high + _HAIR * abs(high)

    @property
    def even(self) -> bool:
        """Whether each value covers one step and follows the one before."""
        return self._past.even

    @property
    def steps(self) -> Ints:
        """Return the step of each value."""
        return self._past.steps

    @property
    def strides(self) -> Ints:
        """Return how many steps each value covers."""
        return self._past.strides


class Window(Operator):
    """``expr[steps] offset M``: the records whose step lies in ``(t - M - steps, t - M]``.

    Warm-up: full enough once known finite records cover 20 % of the steps. State: none beside the history. Cost: two
    binary searches a record, and none where each step was measured.
    """

    __slots__ = ("_offset", "_steps")

    lazy = sleeps = True

    def __init__(self, steps: int, offset: int) -> None:
        self._steps = steps
        self._offset = offset

    def feed(self, frame: Frame, inputs: Sequence[Any]) -> View:
        """Return the bounds that each row of the block sees."""
        past: Past = inputs[0]
        before = (0, 0)
        if past.last_step is not None:
            last = past.last_step - self._offset
            before = (past.through(last - self._steps), past.through(last))
        if past.even and frame.even:
            first = frame.steps[0] - self._offset - self._steps - past.first + 1
            if first >= 0:
                return View(past, frame.rows, frame.everywhere, before, first, self._steps)
        end = frame.step - self._offset
        start = end - self._steps
        low, high = past.through(start), past.through(end)
        full = frame.all(FULL * past.covers(start, end, low, high) >= self._steps)
        first, size = int(low[0]), int(high[0] - low[0])
        if full is frame.everywhere and int(low[-1]) - first == frame.rows - 1:
            rows = np.arange(first, first + frame.rows)
            if (low == rows).all() and (high == rows + size).all():
                return View(past, frame.rows, full, before, first, size, low, high)
        return View(past, frame.rows, full, before, None, 0, low, high)


def over_windows(
    frame: Frame,
    view: View,
    least: int,
    reckon: Callable[[int, int], float],
    slide: Callable[[int, int, int], Floats] | None = None,
) -> Series:
    """Return ``reckon(low, high)`` for each row whose window is full enough and holds at least ``least`` values.

    A window that did not move since the row before keeps its value. The result of a window is fresh where its
    source is. ``slide(first, count, size)`` may reckon ``count`` windows at once, the first ``[first, first + size)`` and
    each one further than the one before; it gives the numbers that ``reckon`` gives.
    """
    if slide is not None and view.first is not None and frame.rows >= MANY and view.size >= least:
        # The usual case, without detours.
        return Series(slide(view.first, frame.rows, view.size), view.full, view.fresh)
    values = np.full(frame.rows, np.nan)
    sizes = view.high - view.low
    known = frame.both(view.full, frame.all(sizes >= least))
    rows = np.flatnonzero(known)
    if not len(rows):
        return Series(values, known, view.fresh)
    lows, sizes = view.low[rows], sizes[rows]
    moved = np.ones(len(rows), dtype=np.bool_)
    moved[1:] = (np.diff(lows) != 0) | (np.diff(sizes) != 0)
    first_of = np.flatnonzero(moved)
    lows, sizes = lows[first_of], sizes[first_of]
    found = np.empty(len(lows))
    for start, end in _slides(lows, sizes, slide is not None):
        if slide is not None and end - start >= MANY:
            found[start:end] = slide(int(lows[start]), end - start, int(sizes[start]))
        else:
            for place, (low, size) in enumerate(zip(lows[start:end].tolist(), sizes[start:end].tolist(), strict=True)):
                found[start + place] = reckon(low, low + size)
    values[rows] = found[np.cumsum(moved) - 1]
    return Series(values, known, view.fresh)


def _slides(lows: Ints, sizes: Ints, cut: bool) -> Iterator[tuple[int, int]]:
    """Yield the stretches ``[start, end)`` in which each window has one size and begins one value after the one before."""
    breaks = (np.flatnonzero((np.diff(lows) != 1) | (np.diff(sizes) != 0)) + 1).tolist() if cut else []
    yield from pairwise([0, *breaks, len(lows)])


def side_by_side(values: NDArray[Any], first: int, count: int, size: int) -> Iterator[tuple[slice, NDArray[Any]]]:
    """Yield ``count`` windows as rows of matrices, each with the slice of the windows that are in it. Nothing is copied.

    A matrix is small enough that what is reckoned from it stays near the processor.
    """
    step = values.itemsize
    windows = np.ndarray((count, size), values.dtype, values, first * step, (step, step))
    rows = max(1, MATRIX // size)
    for start in range(0, count, rows):
        part = slice(start, min(start + rows, count))
        yield part, windows[part]


def over_sums(frame: Frame, view: View, least: int, running: Ints, back: int = 0) -> Series:
    """Return for each window ``[low, high)`` the whole number ``running[high - back] - running[low]``, as :func:`over_windows`."""
    if view.first is not None and view.size >= least:
        low, high = view.first, view.first + view.size - back
        sums = running[high : high + frame.rows] - running[low : low + frame.rows]
        return Series(sums.astype(np.float64), view.full, view.fresh)
    known = frame.both(view.full, frame.all(view.high - view.low >= least))
    values = np.full(frame.rows, np.nan)
    values[known] = running[view.high[known] - back] - running[view.low[known]]
    return Series(values, known, view.fresh)
