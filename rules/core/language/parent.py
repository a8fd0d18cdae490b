"""Values of an expression over the line that a start resumed from: computed once, the first time that a block brings the line.

Nothing of it is stored: the line itself is, with the start. A block without a line costs a look.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from trainwarden.rules.core.block import Bools, Floats, Ints, Parent

from .series import Frame, Series


class Line:
    """One expression over the parent's line. ``program`` is a :class:`~.compile.Program` with one output."""

    __slots__ = ("_nothing", "_program", "fresh", "known", "parent", "steps", "stride", "values")

    def __init__(self, program: Any) -> None:
        self._program = program
        self._nothing: Series | None = None
        self.parent: Parent | None = None
        self.steps: Ints = np.zeros(0, dtype=np.int64)
        self.values: Floats = np.zeros(0)
        self.known: Bools = np.zeros(0, dtype=np.bool_)
        self.fresh: Bools = self.known
        self.stride = 1

    def of(self, frame: Frame) -> Parent | None:
        """Take up the block's line; None where it has none."""
        parent = frame.block.parent
        if parent is not None and parent is not self.parent:
            found = self._computed(parent)
            self.steps, self.values = parent.block.step, found.values
            self.known, self.fresh = found.known, found.fresh & found.known
            before = parent.block.stride[: int(np.searchsorted(self.steps, parent.resumed_from, side="right"))]
            self.stride = max(1, int(np.median(before[-50:]))) if len(before) else 1
        self.parent = parent
        return parent

    def _computed(self, parent: Parent) -> Series:
        frame = Frame.of(parent.block)
        results: list[Any] = []
        for node, operator in zip(self._program.nodes, self._program.operators(), strict=True):
            results.append(operator.feed(frame, [results[of] for of in node.inputs]))
        found: Series = results[self._program.outputs[0].truth]
        return found

    def nothing(self, frame: Frame) -> Series:
        """Return a series that is unknown at every row."""
        if self._nothing is None or len(self._nothing.values) != frame.rows:
            nowhere = np.zeros(frame.rows, dtype=np.bool_)
            self._nothing = Series(np.full(frame.rows, np.nan), nowhere, nowhere)
        return self._nothing

    def at_resume(self) -> float | None:
        """Return the newest value that was known up to the resume, or None where it was unknown there."""
        assert self.parent is not None
        row = int(np.searchsorted(self.steps, self.parent.resumed_from, side="right")) - 1
        return float(self.values[row]) if row >= 0 and self.known[row] else None
