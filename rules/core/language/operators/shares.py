"""Who does more or less than the others for long: ``uneven`` and ``ahead``, over moving averages of each member of a vector."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from trainwarden.rules.core.block import Floats
from trainwarden.rules.core.language.operator import Function, Operator, Setting, Type
from trainwarden.rules.core.language.series import Frame, Series, Vector

#: Values of a member before it counts.
WARM_UP = 20


class Uneven(Operator):
    """``uneven(x by label, beta=0.98)``: the largest factor by which a member's moving average lies off the members' middle, in either
    direction; ``ahead``: above it alone.

    Each member's values are averaged as by ``ema``, one record like another, and the median of these averages is the middle. What is
    not finite or not positive, and the extremes that a record itself holds, are left out. Unknown with fewer than two members.
    Warm-up: 20 values of a member. State: three numbers a member. Cost: O(members) a record.
    """

    __slots__ = ("_beta", "_both", "_state")

    sleeps = True

    def __init__(self, beta: float, both: bool) -> None:
        self._beta = beta
        self._both = both
        self._state: dict[str, list[float]] = {}  # mean, weight, values so far

    def feed(self, frame: Frame, inputs: Sequence[Any]) -> Series:
        """Return the factor at each row."""
        vector: Vector = inputs[0]
        values = np.full(frame.rows, np.nan)
        chosen = [place for place, number in enumerate(vector.numbers) if number == number]
        if not chosen:
            return Series(values, frame.nowhere, frame.nowhere)
        members = [vector.members[place] for place in chosen]
        names = [repr(vector.numbers[place]) for place in chosen]
        state = np.array([self._state.get(name, [0.0, 0.0, 0.0]) for name in names])
        table = np.stack([member.values for member in members])
        fresh = np.stack([member.fresh & member.known for member in members])
        taken = fresh & np.isfinite(table) & (table > 0)
        for row in range(frame.rows):
            here = taken[:, row]
            if here.any():
                state[here, 0] = self._beta * state[here, 0] + (1 - self._beta) * table[here, row]
                state[here, 1] = self._beta * state[here, 1] + (1 - self._beta)
                state[here, 2] += 1
            values[row] = self._factor(state)
        self._state = {name: own.tolist() for name, own in zip(names, state, strict=True)}
        return Series(values, ~np.isnan(values), np.logical_or.reduce(fresh))

    def _factor(self, state: Floats) -> float:
        enough = state[state[:, 2] >= WARM_UP]
        if len(enough) < 2:
            return float("nan")
        averages = enough[:, 0] / enough[:, 1]
        middle = float(np.median(averages))
        above = float(averages.max()) / middle
        return max(above, middle / float(averages.min())) if self._both else above

    def dump(self) -> Any:
        """Return each member's average."""
        return self._state

    def load(self, state: Any) -> None:
        """Take up the averages."""
        self._state = {name: list(own) for name, own in state.items()}


_SETTINGS = (Setting("beta", 0.98, 0.0, 0.999999),)

FUNCTIONS = (
    Function(
        "uneven", (Type.VECTOR,), Type.NUMBER, lambda of, settings: Uneven(settings["beta"], both=True), _SETTINGS
    ),
    Function(
        "ahead", (Type.VECTOR,), Type.NUMBER, lambda of, settings: Uneven(settings["beta"], both=False), _SETTINGS
    ),
)
