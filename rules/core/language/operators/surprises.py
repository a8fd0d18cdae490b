"""Surprises: ``surprise`` and ``tail``, which together say how odd a value is in a run that has odd values anyway.

A loss falls, is noisy in its own way and has outliers of its own. So a value is compared with the straight line through the
values before it, in their spread (``surprise``), and what is odd is asked of the run's own past (``tail``): six spreads are rare in a mean over all ranks and daily bread in one micro-batch.
"""

from __future__ import annotations

import math
from bisect import bisect_left, insort
from collections import deque
from collections.abc import Sequence
from itertools import pairwise
from statistics import NormalDist
from typing import Any

import numpy as np

from trainwarden.rules.core.language.operator import Function, Operator, Setting, Type
from trainwarden.rules.core.language.packing import pack_floats, pack_ints, unpack_floats, unpack_ints
from trainwarden.rules.core.language.series import Frame, Series
from trainwarden.rules.core.language.sorted_values import SIGMA_OF_MAD, deviation_of, median_of

#: Spread is never taken to be less than this share of the centre (half a quantum of a loss that is rounded to bf16).
LEAST_SPREAD = 0.002
#: Values that a line needs, and different ones among them: fewer say nothing about a spread.
LEAST_VALUES, LEAST_DISTINCT = 30, 3
#: A spread of a few dozen values is itself uncertain, more so in a smoothed log: it is never taken to be less than the average
#: of the spreads around the lines before, which fades by this factor a line.
FADING = 0.8
#: Values of this size are compared and never learnt: their squares are no numbers.
TOO_LARGE = 1e150
#: Spreads below the line from which a value is set aside.
BELOW = 6.0
# The line is drawn anew after so many new values.
_REDRAW = 10
#: The tail: T = STRETCH * q98 * (q98 / q90). A normal distribution has 4.3 spreads there; heavier tails stretch it twice.
HIGH, LOW, STRETCH = 0.98, 0.9, 1.3
#: What is known of a tail before anything was seen: so many values, normal but for this factor, which fade out.
PRIOR_VALUES, PRIOR_SPREAD = 300, 1.3
#: Values beyond this share of the tail, the ones just before and the ones just behind are an event and teach nothing.
EVENT, AROUND = 0.85, 8


class Surprise(Operator):
    """``surprise(x, records=60, cut=6, patience=30)``: distance above the line through the last usual values, in their spreads.

    The line goes through the medians of both halves of the last ``records`` usual values; its spread is 1.4826 x the median absolute
    deviation from it, at least 0.2 % of the centre and half a step of a coarse series. The current value is compared and not
    included. Beyond ``cut`` spreads a value is set aside; once ``patience`` values in a row were, on one side, they are the new normal.
    NaN, infinities and values that are not due or beyond 1e150 change nothing.

    Warm-up: 30 values, 3 of them different. State: ``records`` + ``patience`` values. Cost: O(log records).
    """

    __slots__ = (
        "_above",
        "_aside",
        "_cut",
        "_joined",
        "_least",
        "_middle",
        "_ordered",
        "_patience",
        "_records",
        "_slope",
        "_usual",
        "_wide",
    )

    sleeps = True

    def __init__(self, records: int, cut: float, patience: int) -> None:
        self._records = records
        self._cut = cut
        self._patience = patience
        self._usual: deque[tuple[int, float]] = deque()
        self._aside: deque[tuple[int, float]] = deque()
        self._above = False
        self._joined = 0
        self._slope = 0.0
        self._middle = 0.0
        self._wide = 0.0
        self._least = math.nan
        self._ordered: list[float] = []

    def feed(self, frame: Frame, inputs: Sequence[Any]) -> Series:
        """Return the distance of each row's value from what the rows before it foretold."""
        source: Series = inputs[0]
        taken = (source.fresh & source.known & (np.abs(source.values) < TOO_LARGE)).tolist()
        given = (source.values + 0.0).tolist()
        out = [math.nan] * frame.rows
        known_rows = source.known.tolist()
        for row, step in enumerate(frame.steps):
            if known_rows[row]:
                out[row] = self._away(step, given[row])
                if taken[row]:
                    self._learn(step, given[row], out[row])
        values = np.array(out)
        known = source.known & ~np.isnan(values)
        return Series(np.where(known, values, np.nan), known, source.fresh)

    def _away(self, step: int, value: float) -> float:
        if not self._ordered or math.isnan(self._least):
            return math.nan
        centre = median_of(self._ordered) + self._slope * self._middle
        spread = max(SIGMA_OF_MAD * deviation_of(self._ordered, median_of(self._ordered)), LEAST_SPREAD * abs(centre))
        spread = max(spread, self._least, self._wide)
        foretold = centre + self._slope * (step - self._middle)
        return (value - foretold) / spread if spread > 0 else math.nan

    def _learn(self, step: int, value: float, found: float) -> None:
        if -BELOW <= found <= self._cut or math.isnan(found):
            self._aside.clear()
            self._join(step, value)
            return
        above = found > 0
        if above != self._above:
            self._aside.clear()
            self._above = above
        self._aside.append((step, value))
        if len(self._aside) >= self._patience:
            self._usual, self._aside = self._aside, deque()
            while len(self._usual) > self._records:
                self._usual.popleft()
            self._draw()

    def _join(self, step: int, value: float) -> None:
        self._usual.append((step, value))
        self._joined += 1
        old = self._usual.popleft() if len(self._usual) > self._records else None
        if self._joined >= _REDRAW or len(self._usual) < LEAST_VALUES:
            if len(self._usual) >= LEAST_VALUES:
                self._draw()
            return
        insort(self._ordered, value - self._slope * step)
        if old is not None:
            del self._ordered[bisect_left(self._ordered, old[1] - self._slope * old[0])]

    def _draw(self) -> None:
        self._joined = 0
        steps = [step for step, _ in self._usual]
        values = [value for _, value in self._usual]
        half = len(values) // 2
        run = sum(steps[half:]) / (len(steps) - half) - sum(steps[:half]) / half
        self._middle = sum(steps) / len(steps)
        self._slope = (median_of(sorted(values[half:])) - median_of(sorted(values[:half]))) / run
        self._order(steps, values)
        spread = SIGMA_OF_MAD * deviation_of(self._ordered, median_of(self._ordered))
        self._wide = spread if self._wide == 0 else FADING * self._wide + (1 - FADING) * spread

    def _order(self, steps: list[int], values: list[float]) -> None:
        self._ordered = sorted(value - self._slope * step for step, value in zip(steps, values, strict=True))
        distinct = sorted(set(values))
        self._least = math.nan
        if len(distinct) >= LEAST_DISTINCT:
            coarse = 4 * len(distinct) <= len(values)
            self._least = min(b - a for a, b in pairwise(distinct)) / 2 if coarse else 0.0

    def dump(self) -> Any:
        """Return the usual values and those set aside with their steps, and the line."""
        return {
            "usual": pack_floats(np.array([value for _, value in self._usual])),
            "usual_steps": pack_ints(np.array([step for step, _ in self._usual], dtype=np.int64)),
            "aside": pack_floats(np.array([value for _, value in self._aside])),
            "aside_steps": pack_ints(np.array([step for step, _ in self._aside], dtype=np.int64)),
            "above": self._above,
            "joined": self._joined,
            "slope": self._slope,
            "middle": self._middle,
            "wide": self._wide,
            "least": None if math.isnan(self._least) else self._least,
        }

    def load(self, state: Any) -> None:
        """Take up a dumped state and sort it again."""
        self._usual, self._aside = (
            deque(zip(unpack_ints(state[f"{name}_steps"]).tolist(), unpack_floats(state[name]).tolist(), strict=True))
            for name in ("usual", "aside")
        )
        self._above, self._joined = state["above"], state["joined"]
        self._slope, self._middle, self._wide = state["slope"], state["middle"], state["wide"]
        if len(self._usual) >= LEAST_VALUES:
            self._ordered = sorted(value - self._slope * step for step, value in self._usual)
        self._least = math.nan if state["least"] is None else state["least"]


class Tail(Operator):
    """``tail(x, records=2000)``: how large ``x`` gets in this run when nothing happens, from its own past.

    ``1.3 q98 q98 / q90`` of the last ``records`` values before this one, where ``q98 / q90`` says how heavy the tail is. An event does not
    teach: values beyond 0.85 of the tail are left out, with the 8 before and behind them. Until enough was seen, 300
    made-up normal values of spread 1.3 stand in, which fit an ``x`` in spreads.

    Warm-up: none. State: ``records`` + 8 values. Cost: O(log records).
    """

    __slots__ = ("_kept", "_off", "_ordered", "_records", "_waiting")

    sleeps = True

    def __init__(self, records: int) -> None:
        self._records = records
        normal = NormalDist(0.0, PRIOR_SPREAD)
        made_up = min(PRIOR_VALUES, records)
        self._kept: deque[float] = deque(normal.inv_cdf((place + 0.5) / made_up) for place in range(made_up))
        self._ordered = sorted(self._kept)
        self._waiting: deque[float] = deque()
        self._off = 0

    def feed(self, frame: Frame, inputs: Sequence[Any]) -> Series:
        """Return the tail before each row's own value."""
        source: Series = inputs[0]
        taken = (source.fresh & source.known & np.isfinite(source.values)).tolist()
        given = (source.values + 0.0).tolist()
        out = [math.nan] * frame.rows
        tail = self._reckon()
        for row in range(frame.rows):
            out[row] = tail
            if taken[row] and self._learn(given[row], tail):
                tail = self._reckon()
        values = np.array(out)
        known = source.known & ~np.isnan(values)
        return Series(np.where(known, values, np.nan), known, source.fresh)

    def _reckon(self) -> float:
        high, low = self._quantile(HIGH), self._quantile(LOW)
        return STRETCH * high * max(high / low, 1.0) if low > 0 else math.nan

    def _quantile(self, share: float) -> float:
        place = share * (len(self._ordered) - 1)
        below = int(place)
        part = place - below
        return (
            self._ordered[below] if part == 0 else (1 - part) * self._ordered[below] + part * self._ordered[below + 1]
        )

    def _learn(self, value: float, tail: float) -> bool:
        if value > EVENT * tail:
            self._waiting.clear()
            self._off = AROUND
            return False
        if self._off:
            self._off -= 1
            return False
        self._waiting.append(value)
        if len(self._waiting) <= AROUND:
            return False
        new = self._waiting.popleft()
        self._kept.append(new)
        insort(self._ordered, new)
        if len(self._kept) > self._records:
            del self._ordered[bisect_left(self._ordered, self._kept.popleft())]
        return True

    def dump(self) -> Any:
        """Return the values kept and those that wait."""
        return {
            "kept": pack_floats(np.array(self._kept)),
            "waiting": pack_floats(np.array(self._waiting)),
            "off": self._off,
        }

    def load(self, state: Any) -> None:
        """Take up the values and sort them again."""
        self._kept = deque(unpack_floats(state["kept"]).tolist())
        self._ordered = sorted(self._kept)
        self._waiting = deque(unpack_floats(state["waiting"]).tolist())
        self._off = state["off"]


FUNCTIONS = (
    Function(
        "surprise",
        (Type.NUMBER,),
        Type.NUMBER,
        lambda of, settings: Surprise(int(settings["records"]), settings["cut"], int(settings["patience"])),
        (
            Setting("records", 60, LEAST_VALUES, 10_000, whole=True),
            Setting("cut", 6, 1, 1_000),
            Setting("patience", 30, LEAST_VALUES, 10_000, whole=True),
        ),
    ),
    Function(
        "tail",
        (Type.NUMBER,),
        Type.NUMBER,
        lambda of, settings: Tail(int(settings["records"])),
        (Setting("records", 2000, 100, 100_000, whole=True),),
    ),
)
