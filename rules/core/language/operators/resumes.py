"""Comparison with the attempt that this one resumed from: ``parent``, ``at_resume``, ``resumed``, ``since_resume``, ``departure``.

Windows never span two starts, so what a resume restores wrongly is seen in no window: the learning rate that begins again from 0
(case A06), the optimizer's counter (case A05), the order of the data (cases A09 and A21). Here the expression is computed over
the records of the parent, which are remembered for comparison alone. All but ``resumed`` are unknown where the start did not resume. Like
literals they are no measurements: a record at which nothing else is measured counts nothing.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from typing import Any

import numpy as np

from trainwarden.rules.core.block import Floats
from trainwarden.rules.core.instrument_scale import COMPARED, scaled
from trainwarden.rules.core.language.operator import Function, Operator, Setting, Type
from trainwarden.rules.core.language.packing import pack_floats, unpack_floats
from trainwarden.rules.core.language.parent import Line
from trainwarden.rules.core.language.series import Frame, Series
from trainwarden.rules.core.resumed import LINE_FROM, LINE_RECORDS
from trainwarden.rules.core.trend import Trend, fit

#: Values since the resume from which a departure is known.
LEAST = 5
#: Standard errors that noise and the line's own doubt may explain.
ERRORS = 3.0
#: The noise of one record is at least this share of the level.
LEAST_NOISE = 0.002


class OfParent(Operator):
    """``parent(x)``: what the attempt that this one resumed from recorded at the same step.

    Up to the resume and behind it, as far as the parent came. Unknown where it has no record of the step. Warm-up: that of x,
    in the parent's records. State: none. Cost: O(log n) a record of a step that was made twice.
    """

    __slots__ = ("_line",)

    lazy = of_parent = True

    def __init__(self, program: Any) -> None:
        self._line = Line(program)

    def feed(self, frame: Frame, inputs: Sequence[Any]) -> Series:
        """Return the parent's values at the steps of the block."""
        line = self._line
        if line.of(frame) is None or not len(line.steps) or frame.steps[0] > line.steps[-1]:
            return line.nothing(frame)
        rows = np.minimum(np.searchsorted(line.steps, frame.step), len(line.steps) - 1)
        known = (line.steps[rows] == frame.step) & line.known[rows]
        return Series(np.where(known, line.values[rows], np.nan), known, np.zeros(frame.rows, dtype=np.bool_))


class AtResume(Operator):
    """``at_resume(x, within=20)``: what x was at the step that this start resumed from, in the parent's records.

    Known for the first ``within`` steps of the start, or as many records where a record covers several. Warm-up: that of x, in
    the parent's records. State: none. Cost: O(1) a record.
    """

    __slots__ = ("_line", "_within")

    lazy = of_parent = True

    def __init__(self, program: Any, within: int) -> None:
        self._line = Line(program)
        self._within = within

    def feed(self, frame: Frame, inputs: Sequence[Any]) -> Series:
        """Return the same number for each row that is near enough."""
        line = self._line
        parent = line.of(frame)
        if parent is None:
            return line.nothing(frame)
        value = line.at_resume()
        known = frame.step - parent.resumed_from <= self._within * line.stride
        if value is None or not known.any():
            return line.nothing(frame)
        return Series(np.where(known, value, np.nan), known, np.zeros(frame.rows, dtype=np.bool_))


class SinceResume(Operator):
    """``since_resume()``: steps since the one that this start resumed from, 1 at the first.

    Known for as long as the parent is compared with, which is 1,000 steps or records at least. Warm-up: none. State: none.
    Cost: O(1) a record.
    """

    __slots__ = ()

    lazy = of_parent = True

    def feed(self, frame: Frame, inputs: Sequence[Any]) -> Series:
        """Return the distance of each step."""
        parent = frame.block.parent
        if parent is None:
            return Series(np.full(frame.rows, np.nan), frame.nowhere, frame.nowhere)
        known = frame.step <= parent.last
        return Series(np.where(known, frame.step - parent.resumed_from, np.nan), known, frame.nowhere)


class Resumed(Operator):
    """``resumed()``: the start resumed from a checkpoint, and is still compared with the attempt before.

    Always known, so that an ``and`` with it costs nothing in all other records. Warm-up: none. State: none. Cost: O(1) a block.
    """

    __slots__ = ()

    lazy = True

    def feed(self, frame: Frame, inputs: Sequence[Any]) -> Series:
        """Return the same answer for each row."""
        parent = frame.block.parent
        if parent is None:
            return Series(frame.nowhere, frame.everywhere, frame.nowhere)
        return Series(frame.step <= parent.last, frame.everywhere, frame.nowhere)


class Departure(Operator):
    """``departure(x, records=10, within=200)``: how far x now lies from where the parent's line leads, in spreads of one record.

    The line is fitted to the newest 600 records before the resume, level over the logarithm of the step, robustly. Its distance to
    the mean of the last ``records`` values since the resume is lessened by three standard errors, those of the noise with its
    autocorrelation and those of the line's extrapolation; what they can explain is 0. A spread is at least 0.2 % of the level.
    Known for the first ``within`` steps (or records, where one covers several), NaN and infinities left out. What is an exact multiple of
    what was foretold (2, 8, a root) may be written in another unit, which is decided after 20 records: until then it is unknown. Warm-up:
    20 records of the parent, 5 values. State: ``records`` values. Cost: O(records) a record while it is known, then O(1).
    """

    __slots__ = ("_last", "_line", "_steps", "_trend", "_within")

    of_parent = True

    def __init__(self, program: Any, records: int, within: int) -> None:
        self._line = Line(program)
        self._within = within
        self._last: deque[float] = deque(maxlen=records)
        self._steps: deque[int] = deque(maxlen=records)
        self._trend: tuple[Any, Trend | None] = (None, None)

    def feed(self, frame: Frame, inputs: Sequence[Any]) -> Series:
        """Return the departure after each row."""
        line, source = self._line, inputs[0]
        parent = line.of(frame)
        if parent is None or frame.steps[0] - parent.resumed_from > self._within * line.stride:
            return line.nothing(frame)
        trend = self._fitted()
        while self._steps and self._steps[0] <= parent.resumed_from:  # of before a resume within the start
            self._steps.popleft()
            self._last.popleft()
        taken = (source.fresh & source.known & np.isfinite(source.values)).tolist()
        given = source.values.tolist()
        last = parent.resumed_from + self._within * line.stride
        out = np.full(frame.rows, np.nan)
        for row, step in enumerate(frame.steps):
            if step > last:
                break
            if taken[row] and step > parent.resumed_from:
                self._last.append(given[row])
                self._steps.append(step)
            if trend is not None and len(self._last) >= LEAST:
                out[row] = self._departed(trend, undecided=step <= parent.resumed_from + COMPARED * line.stride)
        known = source.known & ~np.isnan(out)
        return Series(np.where(known, out, np.nan), known, source.fresh)

    def _fitted(self) -> Trend | None:
        parent = self._line.parent
        if self._trend[0] is not parent:
            assert parent is not None
            steps = self._line.steps
            end = int(np.searchsorted(steps, parent.resumed_from, side="right"))
            rows = slice(max(0, end - LINE_RECORDS), end)
            kept = self._line.fresh[rows] & (steps[rows] >= LINE_FROM * parent.resumed_from)
            self._trend = (parent, fit(steps[rows][kept], self._line.values[rows][kept]))
        return self._trend[1]

    def _departed(self, trend: Trend, undecided: bool) -> float:
        values: Floats = np.array(self._last)
        steps = np.array(self._steps, dtype=np.int64)
        expected = trend.at(steps)
        noise = max(trend.noise, LEAST_NOISE * abs(float(np.mean(expected))))
        if undecided and scaled(float(np.mean(values)), float(np.mean(expected))):
            return math.nan
        distance = float(np.mean(values - expected))
        own = noise / math.sqrt(max(len(values) / trend.correlation, 1.0))
        left = abs(distance) - ERRORS * math.hypot(own, trend.error(float(np.mean(steps))))
        return math.copysign(max(left, 0.0) / noise, distance) if noise > 0 else 0.0

    def dump(self) -> Any:
        """Return the last values and their steps."""
        return {"last": pack_floats(np.array(self._last)), "steps": list(self._steps)}

    def load(self, state: Any) -> None:
        """Take up a dumped state."""
        self._last.extend(unpack_floats(state["last"]).tolist())
        self._steps.extend(state["steps"])


FUNCTIONS = (
    Function(
        "parent",
        (Type.NUMBER,),
        Type.NUMBER,
        lambda of, settings: OfParent(settings["program"]),
        of_parent="alone",
    ),
    Function(
        "at_resume",
        (Type.NUMBER,),
        Type.NUMBER,
        lambda of, settings: AtResume(settings["program"], int(settings["within"])),
        (Setting("within", 20, 1, 1_000, whole=True),),
        of_parent="alone",
    ),
    Function("resumed", (), Type.BOOLEAN, lambda of, settings: Resumed()),
    Function("since_resume", (), Type.NUMBER, lambda of, settings: SinceResume()),
    Function(
        "departure",
        (Type.NUMBER,),
        Type.NUMBER,
        lambda of, settings: Departure(settings["program"], int(settings["records"]), int(settings["within"])),
        (Setting("records", 10, LEAST, 1_000, whole=True), Setting("within", 200, 1, 1_000, whole=True)),
        of_parent="too",
    ),
)
