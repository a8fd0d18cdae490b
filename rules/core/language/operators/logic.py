"""Logic: comparisons, ``and``, ``or`` and ``not`` over three values: true, false and unknown.

Unknown is neither true nor false: ``false and unknown`` is false, ``true or unknown`` is true, every other mix is unknown. A
comparison with NaN is false, also under ``not``: the compiler turns ``not a > b`` into ``a <= b``, so that ``Not`` here only ever
meets functions such as ``isnan``. No warm-up, no state, O(1) a record.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from trainwarden.rules.core.language.operator import Operator
from trainwarden.rules.core.language.series import Frame, Series


class Comparison(Operator):
    """One of ``< <= > >= == !=`` on two numbers."""

    __slots__ = ("_operator",)

    lazy = sleeps = True

    def __init__(self, operator: str) -> None:
        self._operator = operator

    def feed(self, frame: Frame, inputs: Sequence[Any]) -> Series:
        """Return where the comparison holds. An unknown number is NaN here, so it never does."""
        left, right = inputs
        a, b = left.values, right.values
        match self._operator:
            case "<":
                true = a < b
            case "<=":
                true = a <= b
            case ">":
                true = a > b
            case ">=":
                true = a >= b
            case "==":
                true = a == b
            case _:
                true = (a < b) | (a > b)
        return Series(true, frame.both(left.known, right.known), frame.either(left.fresh, right.fresh))

    def never(self, left: tuple[float, float], right: tuple[float, float]) -> bool:
        """Say whether no two numbers between these bounds compare like this."""
        (a, b), (c, d) = left, right
        match self._operator:
            case "<":
                return a >= d
            case "<=":
                return a > d
            case ">":
                return b <= c
            case ">=":
                return b < c
            case "==":
                return b < c or a > d
            case _:
                return False


class And(Operator):
    """Kleene's conjunction."""

    __slots__ = ()

    lazy = sleeps = True

    def feed(self, frame: Frame, inputs: Sequence[Any]) -> Series:
        """Return where both hold; known also where one is known to be false."""
        a, b = inputs
        known = frame.both(a.known, b.known)
        values = frame.both(a.values, b.values)
        if known is not frame.everywhere:
            for one in (a, b):
                if one.known is not frame.nowhere:
                    known = frame.either(known, one.known if one.values is frame.nowhere else one.known & ~one.values)
        return Series(values, known, frame.either(a.fresh, b.fresh))


class Or(Operator):
    """Kleene's disjunction."""

    __slots__ = ()

    lazy = sleeps = True

    def feed(self, frame: Frame, inputs: Sequence[Any]) -> Series:
        """Return where one holds; known also where only one is known and true."""
        a, b = inputs
        true = frame.either(a.values, b.values)
        known = frame.both(a.known, b.known)
        if known is not frame.everywhere:
            known = frame.either(known, true)
        return Series(true, known, frame.either(a.fresh, b.fresh))


class Not(Operator):
    """Negation of a boolean that is no comparison."""

    __slots__ = ()

    lazy = sleeps = True

    def feed(self, frame: Frame, inputs: Sequence[Any]) -> Series:
        """Return where the operand is known to be false."""
        source: Series = inputs[0]
        return Series(source.known & np.logical_not(source.values), source.known, source.fresh)
