"""Elementary functions of one number, row by row: ``abs`` and ``log2``. No warm-up, no state, O(1) a record."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from trainwarden.rules.core.language.operator import Function, Operator, Type
from trainwarden.rules.core.language.series import Frame, Series


def binary_logarithm(value: float) -> float:
    """Return log2: minus infinity at 0, NaN below. One number at a time, so that no array length changes a bit."""
    if value > 0:
        return math.log2(value)
    return -math.inf if value == 0 else math.nan


class Absolute(Operator):
    """``abs(x)``: the size of a number."""

    __slots__ = ()

    lazy = sleeps = True

    def feed(self, frame: Frame, inputs: Sequence[Any]) -> Series:
        """Return the absolute values."""
        source: Series = inputs[0]
        return Series(np.abs(source.values), source.known, source.fresh)


class BinaryLogarithm(Operator):
    """``log2(x)``: a loss scale's exponent; a difference of 1 is a factor of two."""

    __slots__ = ()

    lazy = sleeps = True

    def feed(self, frame: Frame, inputs: Sequence[Any]) -> Series:
        """Return the logarithms."""
        source: Series = inputs[0]
        return Series(np.array(list(map(binary_logarithm, source.values.tolist()))), source.known, source.fresh)


FUNCTIONS = (
    Function("abs", (Type.NUMBER,), Type.NUMBER, lambda of, settings: Absolute()),
    Function("log2", (Type.NUMBER,), Type.NUMBER, lambda of, settings: BinaryLogarithm()),
)
