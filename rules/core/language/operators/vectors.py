"""Vectors over ranks or label values: ``spread``, ``argmax``, ``max_over``, ``min_over``, ``mad_over``, ``nonfinite_over``.

Members that are unknown or NaN are left out, but where those that are not finite are counted. The result is known where enough members are known, and NaN where all known ones
are NaN. No warm-up beyond the members' own, no state beside theirs, O(members) a record.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from trainwarden.rules.core.block import Bools, Floats
from trainwarden.rules.core.language.operator import Function, Operator, Type
from trainwarden.rules.core.language.series import Frame, Series, Vector


class Over(Operator):
    """Reduce a vector to one number a step. ``reckon`` gets (members, n) numbers with NaN for what is left out."""

    __slots__ = ("_least", "_reckon")

    sleeps = True

    def __init__(self, reckon: Callable[[Floats], Floats], least: int = 1) -> None:
        self._reckon = reckon
        self._least = least

    def feed(self, frame: Frame, inputs: Sequence[Any]) -> Series:
        """Return the reduction at each row."""
        vector: Vector = inputs[0]
        values = np.full(frame.rows, np.nan)
        if not vector.members:
            return Series(values, frame.nowhere, frame.nowhere)
        table = np.stack([member.values for member in vector.members])
        known = np.stack([member.known for member in vector.members]).sum(axis=0) >= self._least
        fresh = np.logical_or.reduce([member.fresh for member in vector.members])
        usable = known & (~np.isnan(table)).any(axis=0)
        if usable.any():
            values[usable] = self._reckon(table[:, usable])
        return Series(values, known, fresh)


class NonFinite(Operator):
    """``nonfinite_over(x by label)``: how many members are NaN or infinite."""

    __slots__ = ()

    def feed(self, frame: Frame, inputs: Sequence[Any]) -> Series:
        """Return the number at each row at which a member is known."""
        vector: Vector = inputs[0]
        if not vector.members:
            nowhere = np.zeros(frame.rows, dtype=np.bool_)
            return Series(np.full(frame.rows, np.nan), nowhere, nowhere)
        known = np.stack([member.known for member in vector.members])
        bad = known & ~np.isfinite(np.stack([member.values for member in vector.members]))
        some: Bools = np.logical_or.reduce(known, axis=0)
        fresh = np.logical_or.reduce([member.fresh for member in vector.members])
        return Series(np.where(some, bad.sum(axis=0), np.nan), some, fresh)


class Argmax(Operator):
    """``argmax(x by label)``: whose value is the largest: a rank's number, or the place of a label value in the list."""

    __slots__ = ()

    sleeps = True

    def feed(self, frame: Frame, inputs: Sequence[Any]) -> Series:
        """Return the number of the first largest member at each row."""
        vector: Vector = inputs[0]
        numbers = np.array(vector.numbers)
        places = Over(lambda table: np.nanargmax(table, axis=0).astype(np.float64)).feed(frame, inputs)
        values = np.full(frame.rows, np.nan)
        chosen = ~np.isnan(places.values)
        values[chosen] = numbers[places.values[chosen].astype(np.int64)]
        if vector.largest is not None:
            values = np.where(chosen & np.isnan(values), vector.largest.values, values)
        return Series(values, places.known, places.fresh)


def _spread(table: Floats) -> Floats:
    found: Floats = np.nanmax(table, axis=0) - np.nanmin(table, axis=0)
    return found


def _largest(table: Floats) -> Floats:
    found: Floats = np.nanmax(table, axis=0)
    return found


def _smallest(table: Floats) -> Floats:
    found: Floats = np.nanmin(table, axis=0)
    return found


def _mad(table: Floats) -> Floats:
    """Median distance of the members from their median: 0 where more than half of them are one number."""
    found: Floats = np.nanmedian(np.abs(table - np.nanmedian(table, axis=0)), axis=0)
    return found


FUNCTIONS = (
    Function("spread", (Type.VECTOR,), Type.NUMBER, lambda of, settings: Over(_spread, least=2)),
    Function("max_over", (Type.VECTOR,), Type.NUMBER, lambda of, settings: Over(_largest)),
    Function("min_over", (Type.VECTOR,), Type.NUMBER, lambda of, settings: Over(_smallest)),
    Function("mad_over", (Type.VECTOR,), Type.NUMBER, lambda of, settings: Over(_mad, least=2)),
    Function("nonfinite_over", (Type.VECTOR,), Type.NUMBER, lambda of, settings: NonFinite()),
    Function("argmax", (Type.VECTOR,), Type.NUMBER, lambda of, settings: Argmax()),
)
