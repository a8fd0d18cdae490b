"""Averages that fade: ``ema``.

The first value counts in full (bias correction), so there is no slow start from zero to mistake for a trend.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from trainwarden.rules.core.language.operator import Function, Operator, Setting, Type
from trainwarden.rules.core.language.series import Frame, Series


class ExponentialAverage(Operator):
    """``ema(x, beta=0.98)``: exponential moving average that includes the current value.

    ``m = b m + (1 - b) x`` and ``w = b w + (1 - b)`` with ``b = beta ^ stride``, and the result is ``m / w``. NaN, infinities and values
    that are not due get no weight and do not let it fade. Warm-up: one value. State: two numbers. Cost: O(1).
    """

    __slots__ = ("_beta", "_mean", "_weight")

    sleeps = True

    def __init__(self, beta: float) -> None:
        self._beta = beta
        self._mean = 0.0
        self._weight = 0.0

    def feed(self, frame: Frame, inputs: Sequence[Any]) -> Series:
        """Return the average after each row."""
        source: Series = inputs[0]
        given = source.values.tolist()
        mean, weight, beta = self._mean, self._weight, self._beta
        everywhere = frame.both(frame.both(source.fresh, source.known), frame.all(np.isfinite(source.values)))
        if everywhere is frame.everywhere and frame.strides.count(1) == frame.rows:
            share = 1 - beta
            averages = []
            for value in given:
                mean = beta * mean + share * value
                weight = beta * weight + share
                averages.append(mean / weight)
            self._mean, self._weight = mean, weight
            found = np.array(averages)
            return Series(found, frame.all(~np.isnan(found)), source.fresh)
        taken = everywhere.tolist()
        out = [np.nan] * frame.rows
        for row, stride in enumerate(frame.strides):
            if taken[row]:
                keep = beta if stride == 1 else beta**stride
                mean = keep * mean + (1 - keep) * given[row]
                weight = keep * weight + (1 - keep)
            if weight:
                out[row] = mean / weight
        self._mean, self._weight = mean, weight
        values = np.array(out)
        known = source.known & ~np.isnan(values)
        if not known.all():
            values[~known] = np.nan
        return Series(values, known, source.fresh)

    def dump(self) -> Any:
        """Return the two running numbers."""
        return [self._mean, self._weight]

    def load(self, state: Any) -> None:
        """Take up the two running numbers."""
        self._mean, self._weight = state


FUNCTIONS = (
    Function(
        "ema",
        (Type.NUMBER,),
        Type.NUMBER,
        lambda of, settings: ExponentialAverage(settings["beta"]),
        (Setting("beta", 0.98, 0.0, 0.999999),),
    ),
)
