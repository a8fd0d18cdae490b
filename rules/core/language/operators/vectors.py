"""Vectors over ranks or label values: ``spread``, ``argmax``, ``max_over``, ``min_over``, ``mad_over``, ``nonfinite_over``,
``median_over``, ``twins``, ``disagree``.

Members that are unknown or NaN are left out, but where those that are not finite are counted. The result is known where enough members are known, and NaN where all known ones
are NaN. No warm-up beyond the members' own, no state beside theirs, O(members) a record.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from trainwarden.rules.core.block import Bools, Floats
from trainwarden.rules.core.language.operator import Function, Operator, Type
from trainwarden.rules.core.language.series import Frame, Series, Vector
from trainwarden.rules.core.ranks_apart import twins


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


class Own(Operator):
    """``median_over`` and ``twins``: of the members that are one rank's or one label value's own, not of the extremes of a record."""

    __slots__ = ("_least", "_reckon")

    sleeps = True

    def __init__(self, reckon: Callable[[Floats], Floats], least: int) -> None:
        self._reckon = reckon
        self._least = least

    def feed(self, frame: Frame, inputs: Sequence[Any]) -> Series:
        """Return the reduction at each row at which enough members are known."""
        vector: Vector = inputs[0]
        own = tuple(place for place, number in enumerate(vector.numbers) if number == number)
        chosen = Vector(
            tuple(vector.numbers[place] for place in own), tuple(vector.members[place] for place in own), None
        )
        return Over(self._reckon, self._least).feed(frame, [chosen])


class Disagree(Operator):
    """``disagree(x by label)``: how many members hold another value than most do: 0 where all are equal, infinite where no value is held
    by more than half of them.

    Only what was measured in this very record counts, of two members or more; else it is not due, and what was known is kept. The
    extremes that a record holds stand in where fewer than two members are measured. State: one number. Cost: O(members) a record.
    """

    __slots__ = ("_last",)

    sleeps = True

    def __init__(self) -> None:
        self._last: float | None = None

    def feed(self, frame: Frame, inputs: Sequence[Any]) -> Series:
        """Return the number at each row."""
        vector: Vector = inputs[0]
        values = np.full(frame.rows, np.nan)
        fresh = np.zeros(frame.rows, dtype=np.bool_)
        if not vector.members:
            return Series(values, frame.nowhere, frame.nowhere)
        table = np.stack([np.where(member.fresh & member.known, member.values, np.nan) for member in vector.members])
        own = np.array([number == number for number in vector.numbers])
        for row in range(frame.rows):
            for chosen in (table[own, row], table[~own, row]):
                held = chosen[~np.isnan(chosen)]
                if len(held) > 1:
                    most = int(np.unique(held, return_counts=True)[1].max())
                    self._last = float(len(held) - most) if 2 * most > len(held) else math.inf
                    fresh[row] = True
                    break
            if self._last is not None:
                values[row] = self._last
        return Series(values, ~np.isnan(values), fresh)

    def dump(self) -> Any:
        """Return the last number; a text where it is infinite."""
        return "inf" if self._last == math.inf else self._last

    def load(self, state: Any) -> None:
        """Take up the last number."""
        self._last = None if state is None else float(state)


def _median(table: Floats) -> Floats:
    found: Floats = np.nanmedian(table, axis=0)
    return found


def _twins(table: Floats) -> Floats:
    """How many members hold a value that another holds too; 0 where they fall into groups of one size."""
    found: Floats = twins(table).sum(axis=0).astype(np.float64)
    return found


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
    Function("median_over", (Type.VECTOR,), Type.NUMBER, lambda of, settings: Own(_median, least=3)),
    Function("twins", (Type.VECTOR,), Type.NUMBER, lambda of, settings: Own(_twins, least=3)),
    Function("disagree", (Type.VECTOR,), Type.NUMBER, lambda of, settings: Disagree()),
    Function("argmax", (Type.VECTOR,), Type.NUMBER, lambda of, settings: Argmax()),
)
