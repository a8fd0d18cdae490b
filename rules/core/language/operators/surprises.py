"""Surprises: ``surprise`` and ``tail``, which together say how odd a value is in a run that has odd values anyway.

A loss falls, is noisy in its own way and has outliers of its own. So a value is compared with the straight line through the
values before it, in their spread (``surprise``), and what is odd is asked of the run's own past (``tail``): six spreads are rare in a mean over all ranks and daily bread in one micro-batch.
"""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right, insort
from collections import deque
from collections.abc import Sequence
from itertools import pairwise
from statistics import NormalDist
from typing import Any

import numpy as np
from numpy.typing import NDArray

from trainwarden.rules.core.block import Floats, Ints
from trainwarden.rules.core.language.operator import Function, Operator, Setting, Type
from trainwarden.rules.core.language.packing import pack_floats, pack_ints, unpack_floats, unpack_ints
from trainwarden.rules.core.language.series import Frame, Series
from trainwarden.rules.core.language.sorted_values import SIGMA_OF_MAD, deviation_near, median_of

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
#: Values that are compared at once, as long as they are usual; from how many that is quicker, and for lines through how many.
AHEAD, FEW, LONGEST_AT_ONCE = 512, 24, 300
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
        "_hint",
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
        self._hint = 0

    def feed(self, frame: Frame, inputs: Sequence[Any]) -> Series:
        """Return the distance of each row's value from what the rows before it foretold."""
        source: Series = inputs[0]
        given = source.values + 0.0
        taken = frame.both(frame.both(source.fresh, source.known), frame.all(np.abs(given) < TOO_LARGE))
        if taken is frame.everywhere:
            values = self._follow(frame.step, given)
        elif np.array_equal(taken, source.known):
            values = np.full(frame.rows, np.nan)
            values[taken] = self._follow(frame.step[taken], given[taken])
        else:  # values that are compared and not learnt
            values = np.full(frame.rows, np.nan)
            for row in np.flatnonzero(source.known).tolist():
                step, value = frame.steps[row], float(given[row])
                values[row] = found = self._away(step, value)
                if taken[row]:
                    self._learn(step, value, found)
        return Series(values, frame.both(source.known, frame.all(~np.isnan(values))), source.fresh)

    def _follow(self, steps: Ints, values: Floats) -> Floats:
        """Compare and learn one value after another; those that are usual many at once."""
        found = np.full(len(values), np.nan)
        place, ahead = 0, AHEAD
        while place < len(values):
            if len(values) - place >= FEW and len(self._usual) == self._records <= LONGEST_AT_ONCE:
                part = slice(place, place + ahead)
                joined = self._look_ahead(steps[part], values[part], found[part])
                ahead = min(2 * ahead, AHEAD) if joined == len(found[part]) else max(2 * joined, FEW)
                place += joined
                if joined == len(found[part]):
                    continue
            step, value = int(steps[place]), float(values[place])
            found[place] = away = self._away(step, value)
            self._learn(step, value, away)
            place += 1
        return found

    def _look_ahead(self, steps: Ints, values: Floats, found: Floats) -> int:
        """Reckon as if all values were usual; take in those before the first that is not, and return how many.

        Writes the distances, which hold up to that one.
        """
        size, count = self._records, len(values)
        line = np.concatenate((np.fromiter((value for _, value in self._usual), np.float64, size), values))
        at = np.concatenate((np.fromiter((step for step, _ in self._usual), np.int64, size), steps))
        lines = _Lines(line, at, size, _REDRAW - self._joined, count)
        drawn = lines.places
        # Of each row, the newest line: 0 is the one that is known, and line i was drawn before the row at drawn[i - 1].
        of = np.zeros(count + 1, dtype=np.int64)
        of[drawn] = 1
        of = np.cumsum(of)
        slopes = np.concatenate(([self._slope], lines.slopes))
        middles = np.concatenate(([self._middle], lines.middles))
        leasts = np.concatenate(([self._least], lines.leasts))
        ordered = np.sort(_windows(line, count + 1, size) - slopes[of][:, None] * _windows(at, count + 1, size), axis=1)
        middle = _medians(ordered)
        spreads = SIGMA_OF_MAD * _medians(np.sort(np.abs(ordered - middle[:, None]), axis=1))
        wides = [self._wide]
        for spread in spreads[drawn].tolist():
            wides.append(spread if wides[-1] == 0 else FADING * wides[-1] + (1 - FADING) * spread)
        own = of[:-1]
        centres = middle[:-1] + slopes[own] * middles[own]
        spread = np.maximum(spreads[:-1], LEAST_SPREAD * np.abs(centres))
        spread = np.maximum(np.maximum(spread, leasts[own]), np.array(wides)[own])
        away = (values - (centres + slopes[own] * (steps - middles[own]))) / spread
        away[~(spread > 0)] = np.nan  # also where no spread is known
        found[:] = away
        unusual = (away < -BELOW) | (away > self._cut)
        joined = int(np.argmax(unusual)) if unusual.any() else count
        if joined:
            newest = int(of[joined])
            kept = slice(joined, joined + size)
            self._usual = deque(zip(at[kept].tolist(), line[kept].tolist(), strict=True))
            self._ordered = ordered[joined].tolist()
            self._slope, self._middle, self._least = (
                float(slopes[newest]),
                float(middles[newest]),
                float(leasts[newest]),
            )
            self._wide = wides[newest]
            self._joined = joined - int(drawn[newest - 1]) if newest else self._joined + joined
            self._aside.clear()
        return joined

    def _away(self, step: int, value: float) -> float:
        if not self._ordered or math.isnan(self._least):
            return math.nan
        middle = median_of(self._ordered)
        centre = middle + self._slope * self._middle
        deviation, self._hint = deviation_near(self._ordered, middle, self._hint)
        spread = max(SIGMA_OF_MAD * deviation, LEAST_SPREAD * abs(centre), self._least, self._wide)
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
        deviation, self._hint = deviation_near(self._ordered, median_of(self._ordered), self._hint)
        spread = SIGMA_OF_MAD * deviation
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


class _Lines:
    """The lines that are drawn while all values are usual: the first after ``first`` of ``count`` new values, then every ten.

    ``places`` says after how many values; slope, middle and least spread are those that ``Surprise._draw`` finds one by one.
    """

    __slots__ = ("leasts", "middles", "places", "slopes")

    def __init__(self, line: Floats, at: Ints, size: int, first: int, count: int) -> None:
        self.places = np.arange(first, count + 1, _REDRAW)
        if not len(self.places):
            self.slopes = self.middles = self.leasts = np.zeros(0)
            return
        values = _windows(line, count + 1, size)[first::_REDRAW]
        steps = _windows(at, count + 1, size)[first::_REDRAW]
        half = size // 2
        earlier, later = steps[:, :half].sum(axis=1), steps[:, half:].sum(axis=1)
        self.middles = (earlier + later) / size
        risen = _medians(np.sort(values[:, half:], axis=1)) - _medians(np.sort(values[:, :half], axis=1))
        self.slopes = risen / (later / (size - half) - earlier / half)
        gaps = np.diff(np.sort(values, axis=1), axis=1)
        distinct = 1 + (gaps > 0).sum(axis=1)
        smallest = np.where(gaps > 0, gaps, np.inf).min(axis=1)
        self.leasts = np.where(4 * distinct <= size, smallest / 2, 0.0)
        self.leasts[distinct < LEAST_DISTINCT] = np.nan


def _windows(line: NDArray[Any], count: int, size: int) -> NDArray[Any]:
    """Return ``count`` windows as the rows of a matrix, each one value after the one before. Nothing is copied."""
    return np.ndarray((count, size), line.dtype, line, 0, (line.itemsize, line.itemsize))


def _medians(ordered: Floats) -> Floats:
    """Return the medians of sorted rows, as ``median_of``."""
    half, odd = divmod(ordered.shape[1], 2)
    return ordered[:, half] if odd else 0.5 * ordered[:, half - 1] + 0.5 * ordered[:, half]


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
        taken = frame.both(frame.both(source.fresh, source.known), frame.all(np.isfinite(source.values)))
        if taken is frame.everywhere:
            values = np.array(self._follow((source.values + 0.0).tolist())[:-1])
        else:
            before: Ints = np.cumsum(taken) - taken  # values before each row's own
            values = np.array(self._follow((source.values[taken] + 0.0).tolist()))[before]
        known = frame.both(source.known, frame.all(~np.isnan(values)))
        if known is not frame.everywhere:
            values = np.where(known, values, np.nan)
        return Series(values, known, source.fresh)

    def _follow(self, given: list[float]) -> list[float]:
        """Learn from one value after another, and return the tail before each of them and after the last."""
        ordered, kept, waiting, records = self._ordered, self._kept, self._waiting, self._records
        tail = self._reckon()
        found = []
        low, high = int(LOW * (records - 1)), int(HIGH * (records - 1))
        for value in given:
            found.append(tail)
            if value > EVENT * tail:
                waiting.clear()
                self._off = AROUND
            elif self._off:
                self._off -= 1
            else:
                waiting.append(value)
                if len(waiting) <= AROUND:
                    continue
                new = waiting.popleft()
                kept.append(new)
                into = bisect_right(ordered, new)
                ordered.insert(into, new)
                if len(kept) <= records:
                    tail = self._reckon()
                    continue
                out = bisect_left(ordered, kept.popleft())
                del ordered[out]
                if into > out:
                    into, out = out, into
                # Only what lies between the two places has moved.
                if not (out < low or into > high + 1 or (into > low + 1 and out < high)):
                    tail = self._reckon()
        found.append(tail)
        return found

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
