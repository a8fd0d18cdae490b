"""Closed steps that wait, a bounded short time, for what the other ranks saw in them; and what comes behind them.

Lines are numbered in the order in which things happened, so an event behind a step that waits, waits with it. Runs on the drain
thread alone.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from .across import Joined
from .side import SideGroup

#: Longest time that a step waits for the other ranks, and how many may wait.
HOLD_SECONDS, MOST_HELD = 2.0, 2048


@dataclass(slots=True)
class _Waiting:
    step: int | None
    record: Callable[[Joined | None], Any]
    deadline: float


class Held:
    """What waits, in order. Without a side group nothing does."""

    def __init__(self, side: SideGroup | None) -> None:
        self._side = side
        self._waiting: deque[_Waiting] = deque()

    def __len__(self) -> int:
        return len(self._waiting)

    def put(self, record: Callable[[Joined | None], Any], step: int | None = None) -> None:
        """Have ``record`` called in its turn: at once where nothing waits, given the numbers of ``step`` over all ranks if any."""
        if self._side is None or (step is None and not self._waiting):
            record(None)
        else:
            self._waiting.append(_Waiting(step, record, time.monotonic() + HOLD_SECONDS))

    def next(self, until: float | None = None) -> Callable[[], Any] | None:
        """Return what is to be recorded next, or None while it waits. ``until`` (monotonic) bounds the wait of all."""
        if not self._waiting:
            return None
        first, side = self._waiting[0], self._side
        if first.step is not None and side is not None and side.awaits(first.step):
            late = time.monotonic() > (first.deadline if until is None else min(first.deadline, until))
            if not late and len(self._waiting) <= MOST_HELD:
                return None
        self._waiting.popleft()
        joined = side.take(first.step) if first.step is not None and side is not None else None
        return lambda: first.record(joined)
