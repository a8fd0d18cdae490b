"""Two or three members, each held against its own past: ``alone``."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from trainwarden.rules.core.language.operator import Function, Operator, Type
from trainwarden.rules.core.language.series import Frame, Series, Vector
from trainwarden.rules.core.ranks_few import FEWEST, MOST, Past, alone


class Alone(Operator):
    """``alone(x by label)``: by how many of its own deviations the one of two or three members that left its own past lies above it.

    0 where none did, and where another one lies more than four of its deviations above its own past, too: then it is no matter of
    one. The level is a moving average over about five records, the deviation is that of the differences from record to record over about fifty; an
    outlier goes into neither by more than four deviations. A record counts in which all members were measured and are finite; the extremes that a record holds are left out. Unknown with
    fewer or more members: a middle tells more there. Warm-up: 20 records. State: four numbers a member. Cost: O(members) a record.
    """

    __slots__ = ("_last", "_past")

    sleeps = True

    def __init__(self) -> None:
        self._past: dict[str, Past] = {}
        self._last: float | None = None

    def feed(self, frame: Frame, inputs: Sequence[Any]) -> Series:
        """Return the number at each row."""
        vector: Vector = inputs[0]
        values = np.full(frame.rows, np.nan)
        fresh = np.zeros(frame.rows, dtype=np.bool_)
        chosen = [place for place, number in enumerate(vector.numbers) if number == number]
        if not chosen:
            return Series(values, frame.nowhere, frame.nowhere)
        members = [vector.members[place] for place in chosen]
        names = [repr(vector.numbers[place]) for place in chosen]
        known = np.stack([member.known for member in members])
        table = np.stack([np.where(member.fresh, member.values, np.nan) for member in members])
        for row in range(frame.rows):
            here = np.flatnonzero(known[:, row]).tolist()
            if not FEWEST <= len(here) <= MOST:
                self._last = None
                continue
            column = table[here, row].tolist()
            if all(map(math.isfinite, column)):
                answer = alone([self._past.setdefault(names[place], Past()) for place in here], column)
                self._last = None if answer is None else answer[1]
                fresh[row] = True
            if self._last is not None:
                values[row] = self._last
        return Series(values, ~np.isnan(values), fresh)

    def dump(self) -> Any:
        """Return what is usual of each member, and the last number."""
        return {
            "past": {name: [past.level, past.difference, past.last, past.seen] for name, past in self._past.items()},
            "last": self._last,
        }

    def load(self, state: Any) -> None:
        """Take up a dumped state."""
        self._past = {name: Past(*numbers) for name, numbers in state["past"].items()}
        self._last = state["last"]


FUNCTIONS = (Function("alone", (Type.VECTOR,), Type.NUMBER, lambda of, settings: Alone()),)
