"""The past of an expression, and the windows that look at it.

One history serves all windows of the same expression. It keeps the finite measured values of the longest of them and
nothing else, so its size is bounded by the steps that a rule asks for.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from trainwarden.rules.core.block import Floats, Ints

from .operator import Operator
from .packing import pack_floats, pack_ints, unpack_floats, unpack_ints
from .series import Frame, Series, View

#: A window counts once a fifth of its steps (20 %) is covered; kept whole so that no rounding moves the step.
FULL = 5
#: Longest window and offset together, in steps: 0.8 MB of state.
LONGEST = 100_000
#: From so many neighbouring windows it is quicker to reckon them at once.
MANY = 4
#: Numbers of a matrix of windows: 256 KiB.
MATRIX = 32_768


@dataclass(frozen=True, slots=True)
class Past:
    """A history as its windows see it, with the current block included."""

    values: Floats
    steps: Ints
    strides: Ints
    covered_steps: Ints
    covered: Ints  # one longer than covered_steps: known steps before each of them
    last_step: int | None
    fresh: Any


class History(Operator):
    """Keep the finite measured values of one expression for ``span`` steps.

    Warm-up: none. State: 8 bytes a measured record within ``span`` steps, steps as runs. Cost: O(span) copies a
    block. A record that is not due or not finite adds no value; a known finite one counts towards a window's fullness.
    """

    __slots__ = ("_covered_steps", "_covered_strides", "_last_step", "_span", "_steps", "_strides", "_values")

    def __init__(self, span: int) -> None:
        self._span = span
        self._values: Floats = np.zeros(0)
        self._steps: Ints = np.zeros(0, dtype=np.int64)
        self._strides: Ints = np.zeros(0, dtype=np.int64)
        self._covered_steps: Ints = self._steps
        self._covered_strides: Ints = self._strides
        self._last_step: int | None = None

    def feed(self, frame: Frame, inputs: Sequence[Any]) -> Past:
        """Return the past up to and including the block."""
        source: Series = inputs[0]
        values = source.values + 0.0  # booleans as 0 and 1, and no negative zero
        counts = source.known & np.isfinite(values)
        taken = counts & source.fresh
        stride = frame.block.stride
        everything = bool(taken.all())
        if everything:
            new_values, new_steps, new_strides = values, frame.step, stride
        else:
            new_values, new_steps, new_strides = values[taken], frame.step[taken], stride[taken]
        all_values = np.concatenate((self._values, new_values))
        steps = np.concatenate((self._steps, new_steps))
        strides = np.concatenate((self._strides, new_strides))
        # What is measured at every record covers the steps that it has values of: the arrays are the same ones.
        alike = everything and self._covered_steps is self._steps
        covered_steps, covered_strides = steps, strides
        if not alike:
            covered_steps = np.concatenate((self._covered_steps, frame.step[counts]))
            covered_strides = np.concatenate((self._covered_strides, stride[counts]))
        covered = np.zeros(len(covered_steps) + 1, dtype=np.int64)
        np.cumsum(covered_strides, out=covered[1:])
        past = Past(all_values, steps, strides, covered_steps, covered, self._last_step, source.fresh)

        # The row after this block needs what lies within `span` steps of itself, and the one before it for `before`.
        oldest = frame.steps[-1] - self._span
        first = through(steps, oldest)
        self._values, self._steps, self._strides = all_values[first:], steps[first:], strides[first:]
        self._covered_steps, self._covered_strides = self._steps, self._strides
        if not alike:
            first = through(covered_steps, oldest)
            self._covered_steps, self._covered_strides = covered_steps[first:], covered_strides[first:]
        self._last_step = frame.steps[-1]
        return past

    def dump(self) -> Any:
        """Return values as base64 and steps as runs."""
        return {
            "last_step": self._last_step,
            "values": pack_floats(self._values),
            "steps": pack_ints(self._steps),
            "strides": pack_ints(self._strides),
            "covered_steps": pack_ints(self._covered_steps),
            "covered_strides": pack_ints(self._covered_strides),
        }

    def load(self, state: Any) -> None:
        """Take up a dumped history. A shorter span than before drops what it does not need."""
        self._last_step = state["last_step"]
        self._values = unpack_floats(state["values"])
        self._steps, self._strides = unpack_ints(state["steps"]), unpack_ints(state["strides"])
        self._covered_steps = unpack_ints(state["covered_steps"])
        self._covered_strides = unpack_ints(state["covered_strides"])
        if np.array_equal(self._steps, self._covered_steps) and np.array_equal(self._strides, self._covered_strides):
            self._covered_steps, self._covered_strides = self._steps, self._strides


def through(steps: Ints, at: Any) -> Any:
    """Return how many of the ascending ``steps`` are not behind ``at``, which is a number or an array of them.

    Where each step follows the one before, as a rule, nothing is searched.
    """
    if len(steps) and int(steps[-1]) - int(steps[0]) == len(steps) - 1:
        before = int(steps[0]) - 1
        if isinstance(at, int):
            return min(max(at - before, 0), len(steps))
        return np.minimum(np.maximum(at - before, 0), len(steps))
    found = np.searchsorted(steps, at, side="right")
    return int(found) if isinstance(at, int) else found


class Window(Operator):
    """``expr[steps] offset M``: the records whose step lies in ``(t - M - steps, t - M]``.

    Warm-up: full enough once known finite records cover 20 % of the steps. State: none beside the history. Cost: two
    binary searches a record.
    """

    __slots__ = ("_offset", "_steps")

    def __init__(self, steps: int, offset: int) -> None:
        self._steps = steps
        self._offset = offset

    def feed(self, frame: Frame, inputs: Sequence[Any]) -> View:
        """Return the bounds that each row of the block sees."""
        past: Past = inputs[0]
        end = frame.step - self._offset
        start = end - self._steps
        high = through(past.steps, end)
        low = through(past.steps, start)
        if past.covered_steps is past.steps:
            full = FULL * (past.covered[high] - past.covered[low]) >= self._steps
        else:
            covered_high = past.covered[through(past.covered_steps, end)]
            covered_low = past.covered[through(past.covered_steps, start)]
            full = FULL * (covered_high - covered_low) >= self._steps
        before = (0, 0)
        if past.last_step is not None:
            last = past.last_step - self._offset
            before = (
                through(past.steps, last - self._steps),
                through(past.steps, last),
            )
        return View(past.values, past.steps, past.strides, low, high, before, full, past.fresh)


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
    first, size = int(view.low[0]), int(view.high[0] - view.low[0])
    if slide is not None and frame.rows >= MANY and size >= least and view.full.all():
        rows = np.arange(first, first + frame.rows)
        if (view.low == rows).all() and (view.high == rows + size).all():  # the usual case, without detours
            return Series(slide(first, frame.rows, size), view.full, view.fresh)
    values = np.full(frame.rows, np.nan)
    sizes = view.high - view.low
    known = view.full & (sizes >= least)
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
    known = view.full & (view.high - view.low >= least)
    values = np.full(frame.rows, np.nan)
    values[known] = running[view.high[known] - back] - running[view.low[known]]
    return Series(values, known, view.fresh)
