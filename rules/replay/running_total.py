"""Skipped steps that a log counts from its beginning, under a name that does not say so (case A15: "+1 per nan row").

A record's own count falls back to 0 where a step is not skipped, and is the number of its steps where all are. A number that has
never fallen, stays at one level above 1 and is not that number is a running total: from there on it counts by what it grew, and
where it falls it was begun anew.
"""

from __future__ import annotations

import math

#: Records for which a level must stay.
STAYS = 3


class RunningTotal:
    """Takes a column's values one after another and returns what each record counts."""

    def __init__(self) -> None:
        self._last = math.nan
        self._stayed = 0
        self._fell = self._total = False

    def take(self, value: float, stride: int) -> float:
        """Return the skipped steps of a record that covers ``stride`` steps, by the value that the log has for it."""
        if not math.isfinite(value):
            return value
        grown = 0.0 if math.isnan(self._last) else value - self._last
        self._stayed = self._stayed + 1 if grown == 0 else 1
        self._last = value
        if self._total:
            return value if grown < 0 else grown
        self._fell = self._fell or grown < 0
        stays = value > 1 and value != stride and self._stayed >= STAYS
        self._total = not self._fell and (value > stride or stays)
        return grown if self._total else value
