"""Arithmetic: ``+ - * / % ^`` and unary minus, row by row, by the rules of IEEE 754.

Division by zero gives an infinity or NaN, never an error. ``%`` has the sign of its left side, as in PromQL. A result is known
where both sides are, and fresh where one of them is. No warm-up, no state, O(1) a record.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from trainwarden.rules.core.block import Floats
from trainwarden.rules.core.language.operator import Operator
from trainwarden.rules.core.language.series import Frame, Series


def power(base: float, exponent: float) -> float:
    """Return ``base ^ exponent``: NaN where there is no real result, an infinity where it is too large.

    One number at a time: a vectorised power may round differently by the length of the array.
    """
    try:
        return math.pow(base, exponent)
    except ValueError:
        return math.inf if base == 0 else math.nan
    except OverflowError:
        negative = base < 0 and exponent % 2 == 1
        return -math.inf if negative else math.inf


class Constant(Operator):
    """A literal: known at every row, measured at none."""

    __slots__ = ("_last", "_value")

    lazy = True

    def __init__(self, value: float) -> None:
        self._value = value
        self._last: Floats | None = None  # blocks of one stream mostly have one size

    def feed(self, frame: Frame, inputs: Sequence[Any]) -> Series:
        """Return the same number for each row."""
        if self._last is None or len(self._last) != frame.rows:
            self._last = np.full(frame.rows, self._value)
        return Series(self._last, frame.everywhere, frame.nowhere)

    def bounds(self, frame: Frame, inputs: Sequence[Any]) -> tuple[float, float] | None:
        """Return the number."""
        return (self._value, self._value) if math.isfinite(self._value) else None


class Arithmetic(Operator):
    """One of the six operators on two series."""

    __slots__ = ("_operator",)

    lazy = sleeps = True

    def __init__(self, operator: str) -> None:
        self._operator = operator

    def feed(self, frame: Frame, inputs: Sequence[Any]) -> Series:
        """Return the result for each row."""
        left, right = inputs
        match self._operator:
            case "+":
                values = left.values + right.values
            case "-":
                values = left.values - right.values
            case "*":
                values = left.values * right.values
            case "/":
                values = left.values / right.values
            case "%":
                values = np.fmod(left.values, right.values)
            case _:
                values = np.array(list(map(power, left.values.tolist(), right.values.tolist())))
        known = frame.both(left.known, right.known)
        if self._operator == "^" and not known.all():  # 1 ^ NaN and NaN ^ 0 are 1
            values = np.where(known, values, np.nan)
        return Series(values, known, frame.either(left.fresh, right.fresh))

    def bounds(self, frame: Frame, inputs: Sequence[Any]) -> tuple[float, float] | None:
        """Return the least and the largest result of the ends: each of the four is monotonic in both sides."""
        (a, b), (c, d) = inputs
        match self._operator:
            case "+":
                ends = [a + c, b + d]
            case "-":
                ends = [a - d, b - c]
            case "*":
                ends = [a * c, a * d, b * c, b * d]
            case "/" if c > 0 or d < 0:
                ends = [a / c, a / d, b / c, b / d]
            case _:
                return None
        return (min(ends), max(ends)) if all(map(math.isfinite, ends)) else None


class Negation(Operator):
    """Unary minus."""

    __slots__ = ()

    lazy = sleeps = True

    def feed(self, frame: Frame, inputs: Sequence[Any]) -> Series:
        """Return the negated values."""
        source: Series = inputs[0]
        return Series(-source.values, source.known, source.fresh)

    def bounds(self, frame: Frame, inputs: Sequence[Any]) -> tuple[float, float] | None:
        """Return the ends the other way round."""
        ((low, high),) = inputs
        return -high, -low
