"""The past of an expression: one history serves all windows of the same expression.

It keeps the finite measured values of the longest of them and nothing else, so its size is bounded by the steps that a rule
asks for.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from trainwarden.rules.core.block import Bools, Floats, Ints

from .operator import Operator
from .packing import pack_floats, pack_ints, unpack_floats, unpack_ints
from .series import Frame, Series

#: Room for so many values more is made at once, and for a quarter of what there is.
ROOM = 64


class Past:
    """A history as its windows see it, with the current block included.

    ``even``: what it holds was measured step by step, at the steps from ``first`` on; then steps and strides are arrays only once
    somebody asks for them.
    """

    __slots__ = ("_covered", "_covered_steps", "_steps", "_strides", "even", "first", "fresh", "last_step", "values")

    def __init__(
        self,
        values: Floats,
        last_step: int | None,
        fresh: Bools,
        first: int | None,
        steps: Ints | None = None,
        strides: Ints | None = None,
        covered_steps: Ints | None = None,
        covered: Ints | None = None,
    ) -> None:
        self.values = values
        self.last_step = last_step
        self.fresh = fresh
        self.even = first is not None
        self.first = 0 if first is None else first
        self._steps = steps
        self._strides = strides
        self._covered_steps = covered_steps
        self._covered = covered

    @property
    def steps(self) -> Ints:
        """Return the step of each value."""
        if self._steps is None:
            self._steps = np.arange(self.first, self.first + len(self.values), dtype=np.int64)
        return self._steps

    @property
    def strides(self) -> Ints:
        """Return how many steps each value covers."""
        if self._strides is None:
            self._strides = np.ones(len(self.values), dtype=np.int64)
        return self._strides

    def through(self, at: Any) -> Any:
        """Return how many values are not behind step ``at``, which is a number or an array of them."""
        if not self.even:
            return through(self.steps, at)
        before, size = self.first - 1, len(self.values)
        if isinstance(at, int):
            return min(max(at - before, 0), size)
        return np.minimum(np.maximum(at - before, 0), size)

    def covers(self, start: Ints, end: Ints, low: Ints, high: Ints) -> Ints:
        """Return how many known steps lie in ``(start, end]``, where the values ``[low, high)`` lie."""
        if self.even:
            return high - low
        assert self._covered is not None
        assert self._covered_steps is not None
        if self._covered_steps is not self._steps:
            low, high = through(self._covered_steps, start), through(self._covered_steps, end)
        found: Ints = self._covered[high] - self._covered[low]
        return found


class History(Operator):
    """Keep the finite measured values of one expression for ``span`` steps.

    Warm-up: none. State: 8 bytes a measured record within ``span`` steps, steps as runs. Cost: O(1) a record measured step by
    step, else O(span) copies a block. A record that is not due or not finite adds no value; a known finite one counts towards a
    window's fullness.
    """

    __slots__ = (
        "_buffer",
        "_covered_steps",
        "_covered_strides",
        "_end",
        "_first",
        "_last_step",
        "_span",
        "_start",
        "_steps",
        "_strides",
        "_values",
    )

    sleeps = True

    def __init__(self, span: int) -> None:
        self._span = span
        self._last_step: int | None = None
        # Values measured step by step, from step `_first` on, lie in `_buffer[_start:_end]`; None for others, which lie below.
        self._first: int | None = 0
        self._buffer: Floats = np.zeros(0)
        self._start = self._end = 0
        self._values: Floats = np.zeros(0)
        self._steps: Ints = np.zeros(0, dtype=np.int64)
        self._strides: Ints = np.zeros(0, dtype=np.int64)
        self._covered_steps: Ints = self._steps
        self._covered_strides: Ints = self._strides

    def feed(self, frame: Frame, inputs: Sequence[Any]) -> Past:
        """Return the past up to and including the block."""
        source: Series = inputs[0]
        values = source.values + 0.0  # booleans as 0 and 1, and no negative zero
        counts = frame.both(source.known, frame.all(np.isfinite(values)))
        taken = frame.all(frame.both(counts, source.fresh))
        if taken is frame.everywhere and frame.even and self._follows(frame.steps[0]):
            return self._feed_even(frame, values, source.fresh)
        if self._first is not None:
            self._spell_out()
        return self._feed_any(frame, values, counts, taken, source.fresh)

    def _follows(self, step: int) -> bool:
        """Say whether values from ``step`` on go on step by step."""
        if self._first is None:
            return False
        if self._start == self._end:
            self._first = step
        return self._first + self._end - self._start == step

    def _feed_even(self, frame: Frame, values: Floats, fresh: Bools) -> Past:
        assert self._first is not None
        end = self._end + frame.rows
        if end > len(self._buffer):
            kept = self._end - self._start
            buffer = np.empty(kept + frame.rows + max(ROOM, kept // 4))
            buffer[:kept] = self._buffer[self._start : self._end]
            self._buffer, self._start, self._end = buffer, 0, kept
            end = kept + frame.rows
        self._buffer[self._end : end] = values
        self._end = end
        past = Past(self._buffer[self._start : end], self._last_step, fresh, self._first)
        # The row after this block needs what lies within `span` steps of itself, and the one before it for `before`.
        gone = min(max(frame.steps[-1] - self._span - self._first + 1, 0), end - self._start)
        self._start += gone
        self._first += gone
        self._last_step = frame.steps[-1]
        return past

    def _spell_out(self) -> None:
        """Go over to values at any steps."""
        assert self._first is not None
        self._values = self._buffer[self._start : self._end].copy()
        self._steps = np.arange(self._first, self._first + len(self._values), dtype=np.int64)
        self._strides = np.ones(len(self._values), dtype=np.int64)
        self._covered_steps, self._covered_strides = self._steps, self._strides
        self._buffer, self._start, self._end, self._first = np.zeros(0), 0, 0, None

    def _take_up(self) -> None:
        """Go back to values measured step by step, if that is what they are by now."""
        kept = len(self._steps)
        even = not kept or int(self._steps[-1]) - int(self._steps[0]) == kept - 1
        if even and self._covered_steps is self._steps and bool((self._strides == 1).all()):
            self._first = int(self._steps[0]) if kept else 0
            self._buffer, self._start, self._end = self._values.copy(), 0, kept
            self._values = np.zeros(0)
            self._steps = self._strides = self._covered_steps = self._covered_strides = np.zeros(0, dtype=np.int64)

    def _feed_any(self, frame: Frame, values: Floats, counts: Bools, taken: Bools, fresh: Bools) -> Past:
        stride = frame.block.stride
        everything = taken is frame.everywhere
        if everything:
            new_values, new_steps, new_strides = values, frame.step, stride
        else:
            new_values, new_steps, new_strides = values[taken], frame.step[taken], stride[taken]
        all_values = np.concatenate((self._values, new_values))
        steps = np.concatenate((self._steps, new_steps))
        strides = np.concatenate((self._strides, new_strides))
        # What is measured at every record covers the steps that it has values of: the arrays are the same ones.
        alike = everything and self._covered_steps is self._steps
        covered_steps, covered_strides = steps, strides
        if not alike:
            covered_steps = np.concatenate((self._covered_steps, frame.step[counts]))
            covered_strides = np.concatenate((self._covered_strides, stride[counts]))
        covered = np.zeros(len(covered_steps) + 1, dtype=np.int64)
        np.cumsum(covered_strides, out=covered[1:])
        past = Past(all_values, self._last_step, fresh, None, steps, strides, covered_steps, covered)

        # As above.
        oldest = frame.steps[-1] - self._span
        first = through(steps, oldest)
        self._values, self._steps, self._strides = all_values[first:], steps[first:], strides[first:]
        if alike:
            self._covered_steps, self._covered_strides = self._steps, self._strides
        else:
            first_covered = through(covered_steps, oldest)
            self._covered_steps, self._covered_strides = covered_steps[first_covered:], covered_strides[first_covered:]
            if everything and len(self._steps) == len(self._covered_steps):
                # A value at each step that is covered: the two differed before, in what is gone.
                self._covered_steps, self._covered_strides = self._steps, self._strides
        self._last_step = frame.steps[-1]
        if everything and frame.even:
            self._take_up()
        return past

    def dump(self) -> Any:
        """Return values as base64 and steps as runs."""
        if self._first is not None:
            kept = self._end - self._start
            steps = [[self._first, 1 if kept > 1 else 0, kept]] if kept else []
            strides = [[1, 0, kept]] if kept else []
            values = pack_floats(self._buffer[self._start : self._end])
            return _dumped(self._last_step, values, steps, strides, steps, strides)
        steps, strides = pack_ints(self._steps), pack_ints(self._strides)
        covered_steps, covered_strides = steps, strides
        if self._covered_steps is not self._steps:
            covered_steps, covered_strides = pack_ints(self._covered_steps), pack_ints(self._covered_strides)
        return _dumped(self._last_step, pack_floats(self._values), steps, strides, covered_steps, covered_strides)

    def load(self, state: Any) -> None:
        """Take up a dumped history. A shorter span than before drops what it does not need."""
        self._last_step = state["last_step"]
        self._first = None
        self._values = unpack_floats(state["values"])
        self._steps, self._strides = unpack_ints(state["steps"]), unpack_ints(state["strides"])
        self._covered_steps = unpack_ints(state["covered_steps"])
        self._covered_strides = unpack_ints(state["covered_strides"])
        if np.array_equal(self._steps, self._covered_steps) and np.array_equal(self._strides, self._covered_strides):
            self._covered_steps, self._covered_strides = self._steps, self._strides
        self._take_up()


def _dumped(last_step: int | None, values: str, steps: Any, strides: Any, covered: Any, covered_strides: Any) -> Any:
    return {
        "last_step": last_step,
        "values": values,
        "steps": steps,
        "strides": strides,
        "covered_steps": covered,
        "covered_strides": covered_strides,
    }


def through(steps: Ints, at: Any) -> Any:
    """Return how many of the ascending ``steps`` are not behind ``at``, which is a number or an array of them.

    Where each step follows the one before, as a rule, nothing is searched.
    """
    if len(steps) and int(steps[-1]) - int(steps[0]) == len(steps) - 1:
        before = int(steps[0]) - 1
        if isinstance(at, int):
            return min(max(at - before, 0), len(steps))
        return np.minimum(np.maximum(at - before, 0), len(steps))
    found = np.searchsorted(steps, at, side="right")
    return int(found) if isinstance(at, int) else found
