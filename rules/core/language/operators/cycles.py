"""Cycles: ``period`` finds that something happens again and again at even distances."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from trainwarden.rules.core.language.operator import Function, Operator, Setting, Settings, Type
from trainwarden.rules.core.language.series import Frame, Series

#: Beginnings that are kept; with more in the window the oldest is forgotten.
MOST_EVENTS = 64
# This share of the distances must fit, the newest among them: one event that does not belong is forgiven in five.
_FIT = 0.8
# A period is over once this many of its lengths passed without an event.
_PATIENCE = 1.5


class Period(Operator):
    """``period(x > 1.2, window=20000, min_events=4, tolerance=0.1, gap=10)``: the period in steps, or 0.

    An event begins where the boolean turns true after at least ``gap`` steps without it; a spike that flickers is one
    event. The period is the median distance of the beginnings within ``window``, given that there are ``min_events``
    of them, that four in five distances (the newest included) are within ``tolerance`` of it, and that the next one is not
    overdue by half a period. Warm-up: ``min_events`` events; before, it is 0. State: at most 64 steps. Cost: O(1), and
    O(events log events) at an event.
    """

    __slots__ = ("_events", "_gap", "_last_true", "_least", "_period", "_tolerance", "_window")

    sleeps = True

    def __init__(self, window: int, least: int, tolerance: float, gap: int) -> None:
        self._window = window
        self._least = least
        self._tolerance = tolerance
        self._gap = gap
        self._events: list[int] = []
        self._last_true: int | None = None
        self._period = 0.0

    def feed(self, frame: Frame, inputs: Sequence[Any]) -> Series:
        """Return the period known at each row."""
        source: Series = inputs[0]
        happens = frame.both(source.values, source.fresh)
        if not frame.any(happens) and not (self._events and self._events[0] <= frame.steps[-1] - self._window):
            rest = np.zeros(frame.rows) if source.known is frame.everywhere else np.where(source.known, 0.0, np.nan)
            if self._period:
                rest[source.known & (frame.step - self._events[-1] <= _PATIENCE * self._period)] = self._period
            return Series(rest, source.known, source.fresh)
        true = happens.tolist()
        known = source.known.tolist()
        out = [np.nan] * frame.rows
        for row, step in enumerate(frame.steps):
            if true[row]:
                if self._last_true is None or step - self._last_true > self._gap:
                    self._events.append(step)
                    del self._events[:-MOST_EVENTS]
                    self._period = self._find()
                self._last_true = step
            if self._events and self._events[0] <= step - self._window:
                self._events = [event for event in self._events if event > step - self._window]
                self._period = self._find()
            if known[row]:
                current = self._period and step - self._events[-1] <= _PATIENCE * self._period
                out[row] = self._period if current else 0.0
        return Series(np.array(out), source.known, source.fresh)

    def dump(self) -> Any:
        """Return the events, the last true step and the period."""
        return {"events": list(self._events), "last_true": self._last_true, "period": self._period}

    def load(self, state: Any) -> None:
        """Take up the events."""
        self._events = list(state["events"])
        self._last_true = state["last_true"]
        self._period = state["period"]

    def _find(self) -> float:
        if len(self._events) < self._least:
            return 0.0
        distances = [later - earlier for earlier, later in zip(self._events, self._events[1:], strict=False)]
        ordered = sorted(distances)
        middle = len(ordered) // 2
        period = float(ordered[middle]) if len(ordered) % 2 else (ordered[middle - 1] + ordered[middle]) / 2
        fits = [abs(distance - period) <= self._tolerance * period for distance in distances]
        return period if fits[-1] and sum(fits) >= max(_FIT * len(fits), self._least - 1) else 0.0


def period(of: Type, settings: Settings) -> Operator:
    """Make the operator of ``period``."""
    return Period(int(settings["window"]), int(settings["min_events"]), settings["tolerance"], int(settings["gap"]))


FUNCTIONS = (
    Function(
        "period",
        (Type.BOOLEAN,),
        Type.NUMBER,
        period,
        (
            Setting("window", 20_000, 10, 10_000_000, whole=True),
            Setting("min_events", 4, 3, MOST_EVENTS, whole=True),
            Setting("tolerance", 0.1, 0.0, 0.45),
            Setting("gap", 10, 0, 1_000_000, whole=True),
        ),
    ),
)
