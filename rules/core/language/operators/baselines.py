"""Baselines: ``baseline``, what a number usually is, and ``zscore``, how far from usual it is.

A baseline must not learn from the incident that it is there to find, and must not stay behind for ever once the
normal has changed: both are decided by how long values stay outside.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import deque
from collections.abc import Sequence
from typing import Any

import numpy as np

from trainwarden.rules.core.block import Floats, Ints
from trainwarden.rules.core.language.operator import Function, Operator, Setting, Settings, Type
from trainwarden.rules.core.language.packing import pack_floats, pack_ints, unpack_floats, unpack_ints
from trainwarden.rules.core.language.series import Baseline, Frame, Series
from trainwarden.rules.core.language.sorted_values import SIGMA_OF_MAD, deviation_near, median_of
from trainwarden.rules.core.language.windows import View, over_windows, side_by_side

#: Spread is never taken to be less than this share of the centre: a loss rounded to bf16 moves by 0.4 to 0.8 % in one
#: quantum, and its median absolute deviation is often 0.
LEAST_SPREAD = 0.002
#: However many steps a record covers, a spread is not estimated from fewer records than these (or than the window's
#: steps, if those are fewer).
LEAST_RECORDS = 30
#: Values for which the baseline is reckoned at once, as long as they are usual; and from how many that is quicker.
AHEAD, FEW = 512, 16
#: Longer windows than this are kept sorted instead.
LONGEST_AT_ONCE = 300
# A baseline counts once a fifth of its window is filled, as a window does.
_FULL = 5


class RobustBaseline(Operator):
    """``baseline(x, window=100, cut=6, patience=200, patience_below=patience)``: median of the last usual values.

    The current value is compared with the values before it and excluded. Within ``cut`` spreads (1.4826 x median
    absolute deviation, at least 0.2 % of the centre) it is usual and joins; outside it is set aside. Once values have
    been outside, on one side, for ``patience`` steps in a row (``patience_below`` on the lower side), they are the new normal
    and replace the old. NaN, infinities and values that are not due change nothing.

    Warm-up: values that cover a fifth of ``window``, and with large strides six records. State: at most ``window`` + ``patience`` values. Cost: O(log window).
    """

    __slots__ = (
        "_above",
        "_aside",
        "_aside_steps",
        "_cut",
        "_hint",
        "_least",
        "_ordered",
        "_patience",
        "_steps",
        "_usual",
        "_window",
    )

    sleeps = True

    def __init__(self, window: int, cut: float, patience: tuple[int, int]) -> None:
        self._window = window
        self._least = min(window, LEAST_RECORDS)
        self._cut = cut
        self._patience = patience  # below, above
        self._usual: deque[tuple[float, int]] = deque()
        self._ordered: list[float] = []
        self._hint = 0
        self._steps = 0
        self._aside: deque[tuple[float, int]] = deque()
        self._aside_steps = 0
        self._above = False

    def feed(self, frame: Frame, inputs: Sequence[Any]) -> Baseline:
        """Return the baseline before each row's own value, with its spread."""
        source: Series = inputs[0]
        if not source.fresh.any() and not self._usual:
            nothing = np.full(frame.rows, np.nan)
            return Baseline(nothing, np.zeros(frame.rows, dtype=np.bool_), source.fresh, nothing)
        values = source.values + 0.0  # no negative zero in the sorted list
        taken = frame.both(frame.both(source.fresh, source.known), frame.all(np.isfinite(values)))
        if taken is frame.everywhere:
            centres, scales = self._follow(values, frame.block.stride, frame.rows)
            centres, scales = centres[:-1], scales[:-1]
            known = frame.all(~np.isnan(centres))
            return Baseline(centres, known, source.fresh, scales)
        before: Ints = np.cumsum(taken) - taken  # values before each row's own
        centres, scales = self._follow(values[taken], frame.block.stride[taken], int(before[-1]) + 1)
        centres, scales = centres[before], scales[before]
        known = source.known & ~np.isnan(centres)
        return Baseline(np.where(known, centres, np.nan), known, source.fresh, np.where(known, scales, np.nan))

    def _follow(self, values: Floats, strides: Ints, wanted: int) -> tuple[Floats, Floats]:
        """Learn from all values, and return centre and spread before each of the first ``wanted``; NaN before the warm-up.

        ``wanted`` may be one more than there are values.
        """
        centres, scales = np.full(len(values) + 1, np.nan), np.full(len(values) + 1, np.nan)
        given, covered = values.tolist(), strides.tolist()
        usual: tuple[float, float] | None = None
        changed = True
        place, ahead = 0, AHEAD
        while place < len(given):
            if len(given) - place >= FEW and self._steady(strides[place : place + ahead]):
                part = slice(place, min(place + ahead, len(given)))
                joined = self._look_ahead(values[part], covered[place], centres[part], scales[part])
                ahead = min(2 * ahead, AHEAD) if place + joined == part.stop else max(2 * joined, FEW)
                place += joined
                changed = changed or joined > 0
                if place == part.stop:
                    continue
            if changed:
                usual = self._reckon() if self._warm() else None
                changed = False
            value, stride = given[place], covered[place]
            centres[place], scales[place] = usual or (np.nan, np.nan)
            if usual is None or abs(value - usual[0]) <= self._cut * usual[1]:
                if self._aside:
                    self._aside.clear()
                    self._aside_steps = 0
                self._join(value, stride)
                changed = True
            else:
                changed = self._set_aside(value, stride, value > usual[0])
            place += 1
        if wanted > len(given) and self._warm():
            centres[-1], scales[-1] = self._reckon()
        return centres, scales

    def _warm(self) -> bool:
        return _FULL * self._steps >= self._window and _FULL * len(self._usual) >= self._least

    def _steady(self, strides: Ints) -> bool:
        """Say whether each value that joins drives out exactly one: all cover the same number of steps."""
        kept, stride = len(self._usual), int(strides[0])
        full = kept >= self._least and kept * stride >= self._window
        return (
            full
            and kept <= LONGEST_AT_ONCE
            and (kept == self._least or (kept - 1) * stride < self._window)
            and self._steps == kept * stride
            and bool((strides == stride).all())
            and all(own == stride for _, own in self._usual)
        )

    def _look_ahead(self, values: Floats, stride: int, centres: Floats, scales: Floats) -> int:
        """Reckon as if all values were usual; take in those before the first that is not, and return how many.

        Writes the centres and spreads before each value.
        """
        kept = len(self._usual)
        line = np.concatenate(([value for value, _ in self._usual], values))
        for part, windows in side_by_side(line, 0, len(values), kept):
            ordered = np.sort(windows, axis=1)
            centre = _middle(ordered)
            spread = _middle(np.sort(np.abs(ordered - centre[:, None]), axis=1))
            centres[part], scales[part] = centre, np.maximum(SIGMA_OF_MAD * spread, LEAST_SPREAD * np.abs(centre))
        unusual = np.flatnonzero(~(np.abs(values - centres) <= self._cut * scales))
        joined = int(unusual[0]) if len(unusual) else len(values)
        if joined:
            self._usual = deque((value, stride) for value in line[joined : joined + kept].tolist())
            self._ordered = sorted(value for value, _ in self._usual)
            self._aside.clear()
            self._aside_steps = 0
        return joined

    def dump(self) -> Any:
        """Return usual values and those set aside, with the steps that each covers."""
        state: dict[str, Any] = {}
        for name, kept in (("usual", self._usual), ("aside", self._aside)):
            state[name] = pack_floats(np.array([value for value, _ in kept]))
            state[f"{name}_strides"] = pack_ints(np.array([stride for _, stride in kept], dtype=np.int64))
        return {**state, "aside_steps": self._aside_steps, "above": self._above}

    def load(self, state: Any) -> None:
        """Take up a dumped state and sort it again."""
        usual, aside = (
            deque(zip(unpack_floats(state[name]).tolist(), unpack_ints(state[f"{name}_strides"]).tolist(), strict=True))
            for name in ("usual", "aside")
        )
        self._usual, self._aside = usual, aside
        self._ordered = sorted(value for value, _ in usual)
        self._steps = sum(stride for _, stride in usual)
        self._aside_steps = state["aside_steps"]
        self._above = state["above"]

    def _reckon(self) -> tuple[float, float]:
        centre = median_of(self._ordered)
        deviation, self._hint = deviation_near(self._ordered, centre, self._hint)
        return centre, max(SIGMA_OF_MAD * deviation, LEAST_SPREAD * abs(centre))

    def _set_aside(self, value: float, stride: int, above: bool) -> bool:
        """Set an unusual value aside; say whether the baseline changed."""
        if above != self._above:
            self._aside.clear()
            self._aside_steps = 0
            self._above = above
        self._aside.append((value, stride))
        self._aside_steps += stride
        if self._aside_steps < self._patience[above]:
            # Only the newest window of them could become the new normal.
            if len(self._aside) > self._window:
                self._aside.popleft()
            return False
        self._usual.clear()
        self._ordered.clear()
        self._steps = 0
        for kept in self._aside:
            self._join(*kept)
        self._aside.clear()
        self._aside_steps = 0
        return True

    def _join(self, value: float, stride: int) -> None:
        usual, ordered = self._usual, self._ordered
        usual.append((value, stride))
        insort(ordered, value)
        self._steps += stride
        while len(usual) > self._least and self._steps - usual[0][1] >= self._window:
            old, covered = usual.popleft()
            del ordered[bisect_left(ordered, old)]
            self._steps -= covered


def _middle(ordered: Floats) -> Floats:
    """Return the medians of sorted rows, as ``median_of``."""
    half, odd = divmod(ordered.shape[1], 2)
    return ordered[:, half] if odd else 0.5 * ordered[:, half - 1] + 0.5 * ordered[:, half]


class FromBaseline(Operator):
    """``zscore(x, …)``: distance from ``baseline(x, …)`` in its spreads; NaN where the spread is 0.

    Warm-up, state and cost are those of the baseline, which is shared where both are used.
    """

    __slots__ = ()

    lazy = sleeps = True

    def feed(self, frame: Frame, inputs: Sequence[Any]) -> Series:
        """Return the robust z of each row."""
        source, usual = inputs
        values = (source.values - usual.values) / usual.scale
        values[~(usual.scale > 0)] = np.nan
        return Series(values, source.known & usual.known, source.fresh)


class WithinWindow(Operator):
    """``zscore(x[N])``: the window's newest value against mean and standard deviation of the others in it.

    The deviation is taken as at least 0.2 % of the mean; NaN where both are 0. Warm-up: a window 20 % full with three
    values. State: none beside the history. Cost: O(N), vectorised.
    """

    __slots__ = ()

    lazy = sleeps = True

    def feed(self, frame: Frame, inputs: Sequence[Any]) -> Series:
        """Return the z of each row's newest value."""
        view: View = inputs[0]

        def reckon(low: int, high: int) -> float:
            others: Floats = view.values[low : high - 1]
            mean = float(others.sum()) / len(others)
            away = others - mean
            spread = float(np.sqrt(float((away * away).sum()) / (len(others) - 1)))
            spread = max(spread, LEAST_SPREAD * abs(mean))
            return (float(view.values[high - 1]) - mean) / spread if spread > 0 else np.nan

        def slide(first: int, count: int, size: int) -> Floats:
            found = np.empty(count)
            for part, windows in side_by_side(view.values, first, count, size):
                others = windows[:, :-1]
                mean = others.sum(axis=1) / (size - 1)
                away = others - mean[:, None]
                away *= away
                spread = np.maximum(np.sqrt(away.sum(axis=1) / (size - 2)), LEAST_SPREAD * np.abs(mean))
                found[part] = np.where(spread > 0, (windows[:, -1] - mean) / spread, np.nan)
            return found

        return over_windows(frame, view, 3, reckon, slide)


def baseline(of: Type, settings: Settings) -> Operator:
    """Make the operator of ``baseline``."""
    patience = (int(settings["patience_below"]), int(settings["patience"]))
    return RobustBaseline(int(settings["window"]), settings["cut"], patience)


def zscore(of: Type, settings: Settings) -> Operator:
    """Make the operator of ``zscore``: against the baseline, or within a window."""
    return WithinWindow() if of is Type.WINDOW else FromBaseline()


_SETTINGS = (
    Setting("window", 100, 5, 10_000, whole=True),
    Setting("cut", 6, 1, 1_000),
    Setting("patience", 200, 1, 10_000, whole=True),
    Setting("patience_below", 200, 1, 10_000, whole=True, same_as="patience"),
)
FUNCTIONS = (
    Function("baseline", (Type.NUMBER,), Type.NUMBER, baseline, _SETTINGS),
    Function("zscore", (Type.NUMBER, Type.WINDOW), Type.NUMBER, zscore, _SETTINGS, "baseline"),
)
