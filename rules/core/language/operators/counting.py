"""Counting: ``count`` and ``changes`` over a window, ``streak`` up to now."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from trainwarden.rules.core.block import Bools, Ints
from trainwarden.rules.core.language.operator import Function, Operator, Type
from trainwarden.rules.core.language.series import Frame, Series
from trainwarden.rules.core.language.windows import View, over_sums


def _running(counts: NDArray[Any]) -> Ints:
    """Return the sum of the whole numbers before each place, one longer than they are."""
    found = np.zeros(len(counts) + 1, dtype=np.int64)
    np.cumsum(counts, out=found[1:])
    return found


def _slid(frame: Frame, view: View, flags: Bools, less: int) -> Series | None:
    """Return how many flags are set in each window, of which each lies one value after the one before and holds ``less`` flags less."""
    first, size = view.first, view.size - less
    if first is None or size < 1:
        return None
    counts = np.zeros(frame.rows, dtype=np.int64)
    counts[0] = np.count_nonzero(flags[first : first + size])
    came, went = flags[first + size :][: frame.rows - 1], flags[first : first + frame.rows - 1]
    np.cumsum(came.astype(np.int64) - went, out=counts[1:])
    counts[1:] += counts[0]
    return Series(counts.astype(np.float64), view.full, view.fresh)


class Count(Operator):
    """``count((x > 1)[N])``: at how many of the window's steps the boolean held; a record counts all steps it covers.

    Warm-up: a window 20 % full. State: none beside the history. Cost: O(1).
    """

    __slots__ = ()

    lazy = sleeps = True

    def feed(self, frame: Frame, inputs: Sequence[Any]) -> Series:
        """Return the count over each row's window."""
        view: View = inputs[0]
        found = _slid(frame, view, view.values != 0, 0) if view.even else None
        return found or over_sums(frame, view, 1, _running(view.strides * (view.values != 0)))


class Changes(Operator):
    """``changes(x[N])``: how often a measured value differs from the one before it within the window.

    Warm-up: a window 20 % full. State: none beside the history. Cost: O(1).
    """

    __slots__ = ()

    lazy = sleeps = True

    def feed(self, frame: Frame, inputs: Sequence[Any]) -> Series:
        """Return the number of changes within each row's window."""
        view: View = inputs[0]
        changed = view.values[1:] != view.values[:-1]
        return _slid(frame, view, changed, 1) or over_sums(frame, view, 1, _running(changed), back=1)


class Streak(Operator):
    """``streak(x > 1)``: for how many steps in a row the boolean has held, up to the current one; 0 where it does not.

    Rows at which nothing was measured neither end nor lengthen it; the next measured one counts the steps in between.
    Unknown ends it. Warm-up: none. State: two numbers. Cost: O(1).
    """

    __slots__ = ("_held", "_steps")

    sleeps = True

    def __init__(self) -> None:
        self._steps = 0
        self._held = 0

    def feed(self, frame: Frame, inputs: Sequence[Any]) -> Series:
        """Return the streak at each row."""
        source: Series = inputs[0]
        if source.known is source.fresh is frame.everywhere and not frame.any(source.values):
            self._steps = self._held = 0
            return Series(np.zeros(frame.rows), source.known, source.fresh)
        true, known, fresh = source.values.tolist(), source.known.tolist(), source.fresh.tolist()
        out = [np.nan] * frame.rows
        for row, stride in enumerate(frame.strides):
            if not known[row] or (fresh[row] and not true[row]):
                self._steps = self._held = 0
            elif fresh[row]:
                self._steps += stride + self._held
                self._held = 0
            elif self._steps:
                self._held += stride
            if known[row]:
                out[row] = float(self._steps)
        return Series(np.array(out), source.known, source.fresh)

    def dump(self) -> Any:
        """Return the steps counted and those held back."""
        return [self._steps, self._held]

    def load(self, state: Any) -> None:
        """Take up the two numbers."""
        self._steps, self._held = state


FUNCTIONS = (
    Function("count", (Type.TRUTHS,), Type.NUMBER, lambda of, settings: Count()),
    Function("changes", (Type.WINDOW, Type.TRUTHS), Type.NUMBER, lambda of, settings: Changes()),
    Function("streak", (Type.BOOLEAN,), Type.NUMBER, lambda of, settings: Streak()),
)
