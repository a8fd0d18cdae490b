"""Setbacks: ``setback``, for how much of its life a run has been worse than it already was.

A spike passes and a plateau goes on. What neither does: to lie above the best level that was reached for a good part of all the
steps so far. Measured against the run's own age, ten steps are a lot in a run of thirty and nothing in one of thirty thousand.
"""

from __future__ import annotations

import math
from bisect import bisect_left, insort
from collections import deque
from collections.abc import Sequence
from typing import Any

import numpy as np

from trainwarden.rules.core.block import Floats
from trainwarden.rules.core.language.operator import Function, Operator, Setting, Type
from trainwarden.rules.core.language.packing import pack_floats, unpack_floats
from trainwarden.rules.core.language.series import Frame, Series
from trainwarden.rules.core.language.sorted_values import SIGMA_OF_MAD, deviation_near, median_of
from trainwarden.rules.core.language.windows import side_by_side

#: A value's own noise is its distance from the median of itself and the four values on each side.
AROUND = 9
#: The spread is that of so many distances; fewer than the least say nothing. At least this share of the level.
DISTANCES, LEAST_DISTANCES, LEAST_SPREAD = 60, 12, 0.002
#: From so many records it is quicker to reckon them at once.
MANY = 16


class Setback(Operator):
    """``setback(x, records=8, spreads=2, share=0.03)``: share of the run's steps that ``x`` has now been above its best without a break.

    The level is the median of the last ``records`` values, the best its minimum so far. It is above its best where it exceeds it by
    ``spreads`` robust standard deviations of the values around their own median, and by ``share`` of itself. The steps of that stretch are
    divided by the step number. NaN, infinities and values that are not due change nothing.

    Warm-up: 20 values. State: 80 numbers. Cost: O(records).
    """

    __slots__ = ("_best", "_distances", "_hint", "_last", "_ordered", "_records", "_share", "_since", "_spreads")

    sleeps = True

    def __init__(self, records: int, spreads: float, share: float) -> None:
        self._records = records
        self._spreads = spreads
        self._share = share
        self._last: deque[float] = deque(maxlen=max(records, AROUND))
        self._distances: deque[float] = deque()
        self._ordered: list[float] = []
        self._hint = 0
        self._best = math.inf
        self._since: int | None = None

    def feed(self, frame: Frame, inputs: Sequence[Any]) -> Series:
        """Return the share at each row."""
        source: Series = inputs[0]
        everywhere = source.fresh & source.known & np.isfinite(source.values)
        if frame.rows >= MANY and len(self._distances) == DISTANCES and self._records <= AROUND and everywhere.all():
            return self._at_once(frame, source)
        taken = everywhere.tolist()
        given = (source.values + 0.0).tolist()
        out = np.full(frame.rows, np.nan)
        for row, (step, stride) in enumerate(zip(frame.steps, frame.strides, strict=True)):
            if taken[row]:
                self._take(step - stride, given[row])
            if len(self._ordered) >= LEAST_DISTANCES and step > 0:
                out[row] = 0.0 if self._since is None else min((step - self._since) / step, 1.0)
        known = source.known & ~np.isnan(out)
        return Series(np.where(known, out, np.nan), known, source.fresh)

    def _at_once(self, frame: Frame, source: Series) -> Series:
        """Take many values, all of them measured, with the numbers that one after another gives."""
        line = np.concatenate((list(self._last)[1 - AROUND :], source.values + 0.0))
        distances = np.empty(frame.rows)
        levels = np.empty(frame.rows)
        for part, windows in side_by_side(line, 0, frame.rows, AROUND):
            distances[part] = windows[:, AROUND // 2] - _middle(np.sort(windows, axis=1))
            levels[part] = _middle(np.sort(windows[:, AROUND - self._records :], axis=1))
        noise = np.concatenate((list(self._distances)[1:], distances))
        spreads = np.empty(frame.rows)
        for part, windows in side_by_side(noise, 0, frame.rows, DISTANCES):
            spreads[part] = _middle(np.sort(np.abs(windows - _middle(np.sort(windows, axis=1))[:, None]), axis=1))
        spreads = np.maximum(SIGMA_OF_MAD * spreads, LEAST_SPREAD * np.abs(levels))
        best = np.minimum.accumulate(np.concatenate(([self._best], levels)))
        above = levels - best[:-1]
        lost = (above > self._spreads * spreads) & (above > self._share * np.abs(best[:-1]))
        # The steps before the first record of each stretch; the first stretch may have begun in an earlier block.
        before = frame.step - frame.block.stride
        begins = lost.copy()
        begins[1:] &= ~lost[:-1]
        since = before[np.maximum.accumulate(np.where(begins, np.arange(frame.rows), 0))]
        if lost[0] and self._since is not None:
            ends = np.flatnonzero(~lost)
            since[: int(ends[0]) if len(ends) else frame.rows] = self._since
        shares = np.where(lost, np.minimum((frame.step - since) / frame.step, 1.0), 0.0)
        known = source.known & (frame.step > 0)
        self._last.extend(line[-AROUND:].tolist())
        self._distances = deque(noise[-DISTANCES:].tolist())
        self._ordered = sorted(self._distances)
        self._best = float(best[-1])
        self._since = int(since[-1]) if lost[-1] else None
        return Series(np.where(known, shares, np.nan), known, source.fresh)

    def _take(self, before: int, value: float) -> None:
        self._last.append(value)
        if len(self._last) < self._last.maxlen:  # type: ignore[operator]
            return
        last = list(self._last)
        around = last[-AROUND:]
        distance = around[AROUND // 2] - median_of(sorted(around))
        self._distances.append(distance)
        insort(self._ordered, distance)
        if len(self._distances) > DISTANCES:
            del self._ordered[bisect_left(self._ordered, self._distances.popleft())]
        level = median_of(sorted(last[-self._records :]))
        deviation, self._hint = deviation_near(self._ordered, median_of(self._ordered), self._hint)
        spread = max(SIGMA_OF_MAD * deviation, LEAST_SPREAD * abs(level))
        above = level - self._best
        if above > self._spreads * spread and above > self._share * abs(self._best):
            self._since = before if self._since is None else self._since
        else:
            self._since = None
        self._best = min(self._best, level)

    def dump(self) -> Any:
        """Return the last values, the distances, the best level and since when it is lost."""
        return {
            "last": pack_floats(np.array(self._last)),
            "distances": pack_floats(np.array(self._distances)),
            "best": None if math.isinf(self._best) else self._best,
            "since": self._since,
        }

    def load(self, state: Any) -> None:
        """Take up a dumped state and sort it again."""
        self._last.extend(unpack_floats(state["last"]).tolist())
        self._distances = deque(unpack_floats(state["distances"]).tolist())
        self._ordered = sorted(self._distances)
        self._best = math.inf if state["best"] is None else state["best"]
        self._since = state["since"]


def _middle(ordered: Floats) -> Floats:
    """Return the medians of sorted rows, as ``median_of``."""
    half, odd = divmod(ordered.shape[1], 2)
    return ordered[:, half] if odd else 0.5 * ordered[:, half - 1] + 0.5 * ordered[:, half]


FUNCTIONS = (
    Function(
        "setback",
        (Type.NUMBER,),
        Type.NUMBER,
        lambda of, settings: Setback(int(settings["records"]), settings["spreads"], settings["share"]),
        (
            Setting("records", 8, 3, 1_000, whole=True),
            Setting("spreads", 2, 0, 1_000),
            Setting("share", 0.03, 0, 1_000),
        ),
    ),
)
