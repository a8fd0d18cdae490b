"""Presence: ``absent``, ``isnan`` and ``isinf`` tell the three things apart that are not numbers.

``absent(x)`` is always known. ``isnan`` and ``isinf`` are known where x is; for a value that is not due they speak of the last
one. No warm-up, no state, O(1) a record.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from trainwarden.rules.core.language.operator import Function, Operator, Type
from trainwarden.rules.core.language.series import Frame, Series


class Absent(Operator):
    """``absent(x)``: x is unknown, that is never seen, stale or not warmed up. Not due is not absent."""

    __slots__ = ()

    # Not lazy: it is fresh where its operand is not.

    def feed(self, frame: Frame, inputs: Sequence[Any]) -> Series:
        """Return where the operand is unknown. That it is, is news at every row."""
        source: Series = inputs[0]
        if source.known is frame.nowhere:
            return Series(frame.everywhere, frame.everywhere, frame.everywhere)
        if source.known is frame.everywhere:
            return Series(frame.nowhere, frame.everywhere, source.fresh)
        return Series(~source.known, frame.everywhere, source.fresh | ~source.known)


class IsNan(Operator):
    """``isnan(x)``: x was measured and is not a number. No comparison says so."""

    __slots__ = ()

    lazy = sleeps = True

    def feed(self, frame: Frame, inputs: Sequence[Any]) -> Series:
        """Return where a known value is NaN."""
        source: Series = inputs[0]
        return Series(source.known & np.isnan(source.values), source.known, source.fresh)


class IsInf(Operator):
    """``isinf(x)``: x was measured and is infinite, of either sign."""

    __slots__ = ()

    lazy = sleeps = True

    def feed(self, frame: Frame, inputs: Sequence[Any]) -> Series:
        """Return where a known value is infinite."""
        source: Series = inputs[0]
        return Series(source.known & np.isinf(source.values), source.known, source.fresh)


FUNCTIONS = (
    Function("absent", (Type.NUMBER, Type.BOOLEAN), Type.BOOLEAN, lambda of, settings: Absent()),
    Function("isnan", (Type.NUMBER,), Type.BOOLEAN, lambda of, settings: IsNan()),
    Function("isinf", (Type.NUMBER,), Type.BOOLEAN, lambda of, settings: IsInf()),
)
