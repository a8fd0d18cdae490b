"""Repetition: ``repeats`` finds that values come again in the same order at one distance, as batches do that are read twice."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from trainwarden.rules.core.block import Floats
from trainwarden.rules.core.language.operator import Function, Operator, Setting, Settings, Type
from trainwarden.rules.core.language.series import Frame, Series

#: Values that are remembered; beyond twice as many only every second, fourth, … kind of value is.
MOST = 512
# Fewest values that must have come again in a row, however many each of them stands for.
_FEWEST = 3


class Repeats(Operator):
    """``repeats(x, window=20000, least=20)``: the distance in steps at which the values of ``x`` come again, or 0.

    A value comes again where an equal one was measured within ``window`` steps. The distance is told once so many in a row did at one
    and the same distance that they stand for ``least`` records; the first value that is new ends it. With many values in the window
    only a part of them is remembered, chosen by the value itself, so that one that comes again is chosen again. Warm-up: none;
    before, it is 0. State: at most 1024 values with their steps. Cost: O(1) for each value that is chosen.
    """

    __slots__ = ("_distance", "_every", "_least", "_matches", "_seen", "_window")

    sleeps = True

    def __init__(self, window: int, least: int) -> None:
        self._window = window
        self._least = least
        self._seen: dict[float, int] = {}
        self._every = 1
        self._distance = 0
        self._matches = 0

    def feed(self, frame: Frame, inputs: Sequence[Any]) -> Series:
        """Return the distance known at each row."""
        source: Series = inputs[0]
        measured = np.flatnonzero(frame.both(source.fresh, source.known) & np.isfinite(source.values))
        told = self._told()
        out = np.full(frame.rows, told)
        every, chosen = self._every, measured[_chosen(source.values[measured], self._every)]
        for row in chosen.tolist():
            value = float(source.values[row])
            if self._every != every and not _is_chosen(value, self._every):
                continue
            self._take(value, frame.steps[row])
            if told != self._told():
                out[row:] = told = self._told()
        return Series(np.where(source.known, out, math.nan), source.known, source.fresh)

    def _told(self) -> float:
        enough = self._matches >= _FEWEST and self._matches * self._every >= self._least
        return float(self._distance) if enough else 0.0

    def _take(self, value: float, step: int) -> None:
        before = self._seen.pop(value, None)
        if before is None or step - before > self._window:
            self._distance = self._matches = 0
        elif step - before == self._distance:
            self._matches += 1
        else:
            self._distance, self._matches = step - before, 1
        self._seen[value] = step
        if len(self._seen) <= 2 * MOST:
            return
        for old in [one for one, at in self._seen.items() if step - at > self._window]:
            del self._seen[old]
        while len(self._seen) > MOST and self._every < 1 << 30:
            self._every *= 2
            self._seen = {one: at for one, at in self._seen.items() if _is_chosen(one, self._every)}

    def dump(self) -> Any:
        """Return the values with their steps, what part of them is chosen, and the repetition so far."""
        return [list(self._seen), list(self._seen.values()), self._every, self._distance, self._matches]

    def load(self, state: Any) -> None:
        """Take up the values."""
        values, steps, self._every, self._distance, self._matches = state
        self._seen = dict(zip(values, steps, strict=True))


def _mixed(values: Floats) -> Any:
    """Return 30 bits of each value that look like chance, the same for equal values."""
    bits = (values + 0.0).view(np.uint64)  # -0.0 is 0.0
    mixed = (bits ^ (bits >> np.uint64(33))) * np.uint64(0xFF51AFD7ED558CCD)
    return (mixed >> np.uint64(34)).astype(np.int64)


def _chosen(values: Floats, every: int) -> Any:
    return np.ones(len(values), dtype=np.bool_) if every == 1 else _mixed(values) % every == 0


def _is_chosen(value: float, every: int) -> bool:
    return bool(_mixed(np.array([value]))[0] % every == 0)


def repeats(of: Type, settings: Settings) -> Operator:
    """Make the operator of ``repeats``."""
    return Repeats(int(settings["window"]), int(settings["least"]))


FUNCTIONS = (
    Function(
        "repeats",
        (Type.NUMBER,),
        Type.NUMBER,
        repeats,
        (
            Setting("window", 20_000, 10, 10_000_000, whole=True),
            Setting("least", 20, _FEWEST, 1_000_000, whole=True),
        ),
    ),
)
