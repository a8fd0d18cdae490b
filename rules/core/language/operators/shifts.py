"""Shifts: ``shift_t``, whether a series has jumped to another course, told from its trend and from its own waves.

The question after a spike is whether what was lost comes back: 0.015 of 1.96 that stay are a loss (case A11), and no
single value shows them. Means of two windows do not answer it while the series falls. So two parallel lines are laid through both,
and the jump from one to the other is compared with its standard error. A decline that flattens or ends is no jump: between windows
of one length a curvature cancels, and what remains of a bend counts as distance from the lines and makes the error larger.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from typing import Any

import numpy as np

from trainwarden.rules.core.block import Floats
from trainwarden.rules.core.language.operator import Function, Operator, Setting, Type
from trainwarden.rules.core.language.packing import pack_floats, unpack_floats
from trainwarden.rules.core.language.series import Frame, Series

#: Values are taken by so many; of them the middle ones are averaged, so that single ones do not count.
TOGETHER = 10
_FIRST, _BEHIND = 2, 8
#: Means lie off the lines by no less than this share of the level: smaller ones are rounding.
LEAST_SPREAD = 0.0005
#: The correlation of neighbouring means is taken to be at most this. Of few means it is found too low, by about this over their number.
MOST_ALIKE, FOUND_TOO_LOW = 0.9, 1.5
#: Values of this size are left out: their squares are no numbers.
TOO_LARGE = 1e150
# From so many windows it is quicker to add up all of them at once.
_MANY = 6


class ShiftT(Operator):
    """``shift_t(x, records=200, share=0.004)``: the jump between the last ``records`` values and those before, over its standard error.

    Both stretches are cut into tens, each one number: the mean of its middle six. Least squares lay two lines of one slope through
    them. The jump is the distance between the lines; its standard error comes from the distances from them,
    with the correlation of neighbours (as of an autoregression of first order), so that a smoothed log has as few values as it
    has. Rises are positive. A jump of less than ``share`` of the level is 0. It is found anew every 10 values. NaN, infinities
    and values that are not due change nothing.

    Warm-up: twice ``records``. State: a fifth of ``records``, and 10 values. Cost: O(records / 50).
    """

    __slots__ = ("_half", "_means", "_part", "_share", "_value")

    sleeps = True

    def __init__(self, records: int, share: float) -> None:
        self._half = records // TOGETHER
        self._share = share
        self._part: list[float] = []
        self._means: deque[float] = deque(maxlen=2 * self._half)
        self._value = math.nan

    def feed(self, frame: Frame, inputs: Sequence[Any]) -> Series:
        """Return at each row what the last full ten gave."""
        source: Series = inputs[0]
        taken = frame.both(frame.both(source.fresh, source.known), frame.all(np.abs(source.values) < TOO_LARGE))
        given = source.values if taken is frame.everywhere else source.values[taken]
        held = len(self._part)
        before = self._value
        self._part += given.tolist()
        if len(self._part) < TOGETHER:
            out = np.full(frame.rows, before)
        else:
            found = np.array([before, *self._take()])
            ends = held + (np.arange(1, frame.rows + 1) if taken is frame.everywhere else np.cumsum(taken))
            out = found[ends // TOGETHER]
        known = frame.both(source.known, frame.all(~np.isnan(out)))
        return Series(out if known is frame.everywhere else np.where(known, out, np.nan), known, source.fresh)

    def _take(self) -> list[float]:
        """Take in all full tens; return what each gives."""
        full = len(self._part) // TOGETHER
        parts = np.sort(np.array(self._part[: full * TOGETHER]).reshape(full, TOGETHER), axis=1)
        del self._part[: full * TOGETHER]
        means = parts[:, _FIRST].copy()
        for place in range(_FIRST + 1, _BEHIND):  # one after another: numpy's own sums hang on the number of rows
            means += parts[:, place]
        means /= _BEHIND - _FIRST
        line = np.concatenate((np.array(self._means), means))
        self._means.extend(means.tolist())
        windows = len(line) - 2 * self._half + 1
        if windows <= 0:
            return [math.nan] * full
        # With all the means held, the first window is the one that was the last before.
        found = self._jumps(line[-(2 * self._half + min(windows, full) - 1) :])
        self._value = found[-1]
        return [math.nan] * (full - len(found)) + found

    def _jumps(self, line: Floats) -> list[float]:
        half = self._half
        count = len(line) - 2 * half + 1
        if count >= _MANY:
            sums = _sums([line[place : place + count] for place in range(2 * half)], half)
            return [self._of(*one) for one in zip(*(part.tolist() for part in sums), strict=True)]
        values = line.tolist()
        return [self._of(*_sums(values[place : place + 2 * half], half)) for place in range(count)]

    def _of(self, earlier: float, later: float, slope: float, squares: float, products: float) -> float:
        half = self._half
        jump = later - earlier - slope * half
        level = max(abs(earlier), abs(later))
        if not abs(jump) > self._share * level:
            return 0.0
        across = half * (half * half - 1) / 12
        free = 2 * half - 3
        alike = min(max(products / squares if squares > 0 else 0.0, 0.0) + FOUND_TOO_LOW / half, MOST_ALIKE)
        variance = max(squares / free, (LEAST_SPREAD * level) ** 2)
        error = math.sqrt(variance * (2 / half + half * half / (2 * across)) * (1 + alike) / (1 - alike))
        return jump / error if error > 0 else 0.0

    def dump(self) -> Any:
        """Return the means, the values of the ten that is not full, and what the last one gave."""
        return {
            "part": pack_floats(np.array(self._part)),
            "means": pack_floats(np.array(self._means)),
            "value": None if math.isnan(self._value) else self._value,
        }

    def load(self, state: Any) -> None:
        """Take up a dumped state."""
        self._part = unpack_floats(state["part"]).tolist()
        self._means.extend(unpack_floats(state["means"]).tolist())
        self._value = math.nan if state["value"] is None else state["value"]


def _sums(columns: list[Any], half: int) -> tuple[Any, Any, Any, Any, Any]:
    """Return both means, the slope of both lines, and the sums of the squares of the distances and of the products of neighbours.

    A column is the number at one place of the window, or those of many windows: the same operations in the same order.
    """
    middle = (half - 1) / 2
    sums = []
    lean = 0.0 * columns[0]
    for first in (0, half):
        total = 0.0 * columns[0]
        for place in range(half):
            value = columns[first + place]
            total = total + value
            lean = lean + (place - middle) * value
        sums.append(total / half)
    slope = lean / (half * (half * half - 1) / 6)
    squares = products = 0.0 * columns[0]
    for first, mean in zip((0, half), sums, strict=True):
        last = 0.0 * columns[0]
        for place in range(half):
            off = columns[first + place] - mean - (place - middle) * slope
            squares = squares + off * off
            products = products + off * last
            last = off
    return sums[0], sums[1], slope, squares, products


FUNCTIONS = (
    Function(
        "shift_t",
        (Type.NUMBER,),
        Type.NUMBER,
        lambda of, settings: ShiftT(int(settings["records"]), settings["share"]),
        (Setting("records", 200, 60, 10_000, whole=True), Setting("share", 0.004, 0, 1_000)),
    ),
)
