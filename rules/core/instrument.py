"""Faults of the measurement, which are not faults of the training (design §4.9). Said once, never paged.

Here: a signal that never varied although it must (dead), and one that stopped varying (repeated).
"""

from __future__ import annotations

import math

from msgspec import Struct

#: Signals that vary from record to record in any healthy run.
VARYING = ("loss", "grad_norm", "update_ratio")


class Watch(Struct):
    """What is remembered of one signal: its last value, for how many measurements it held, whether it ever varied."""

    last: float = math.nan
    held: int = 0
    varied: bool = False
    said: bool = False


class Fault(Struct, frozen=True):
    """A notice about the measurement of one signal."""

    kind: str
    signal: str
    says: str


def look(watches: dict[str, Watch], name: str, value: float | None, dead_records: int) -> Fault | None:
    """Take one measurement of a signal that must vary; return a notice the first time that it does not."""
    if value is None or not math.isfinite(value):
        return None
    watch = watches.setdefault(name, Watch())
    if value == watch.last:
        watch.held += 1
    else:
        watch.varied = watch.varied or not math.isnan(watch.last)
        watch.last, watch.held = value, 1
        watch.said = False
    if watch.held < dead_records or watch.said:
        return None
    watch.said = True
    if watch.varied:
        return Fault(
            "repeated_signal",
            name,
            f"{name} has repeated {value:g} for {watch.held} measurements: it is not measured anew.",
        )
    return Fault("dead_signal", name, f"{name} has been {value:g} since the start: it is not measured.")
