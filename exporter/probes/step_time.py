"""Wall-clock time from the previous step's end to this one's."""

from __future__ import annotations

import time

from trainwarden.exporter.probes.probe import Closing, Probe
from trainwarden.exporter.sheet import Reading
from trainwarden.record import Value


class StepTime(Probe):
    """Signal ``step_duration_seconds``; absent for the first step, whose beginning nobody saw."""

    name = "step_time"

    def __init__(self) -> None:
        self._last: float | None = None

    def close(self, closing: Closing) -> None:
        """Read the clock."""
        now = time.perf_counter()
        if self._last is not None:
            closing.sheet.host["step_duration"] = now - self._last
        self._last = now

    def signals(self, reading: Reading) -> dict[str, Value]:
        """Return the duration."""
        seconds = reading.host.get("step_duration")
        return {} if seconds is None else {"step_duration_seconds": seconds}
