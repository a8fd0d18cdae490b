"""The clock: ``idle`` and ``budget``, the two numbers that a hang is found by (design §4.10).

A hang is the absence of records, so these are no signals of a record. They are told at ticks, in seconds, and are unknown
everywhere else: no warm-up, no state, O(1) a tick. What they mean is said where they are computed, in
:mod:`trainwarden.rules.core.progress`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from trainwarden.rules.core.language.operator import Function, Operator, Type
from trainwarden.rules.core.language.series import Frame, Series


class Clock(Operator):
    """``idle()`` or ``budget()``: seconds, as the tick tells them; unknown in a record."""

    __slots__ = ("_key",)

    def __init__(self, name: str) -> None:
        self._key = (f"{name}()",)

    def feed(self, frame: Frame, inputs: Sequence[Any]) -> Series:
        """Return what the block of a tick holds under the function's name."""
        column = frame.block.columns.get(self._key)
        if column is None:
            nowhere = np.zeros(frame.rows, dtype=np.bool_)
            return Series(np.full(frame.rows, np.nan), nowhere, nowhere)
        return Series(column.values, column.present, column.present)


FUNCTIONS = (
    Function("idle", (), Type.NUMBER, lambda of, settings: Clock("idle")),
    Function("budget", (), Type.NUMBER, lambda of, settings: Clock("budget")),
)
