"""Faults of the measurement, which are not faults of the training (design §4.9). Said once, never paged.

Here: a signal that never varied although it must (dead), and one that stopped varying (repeated).
"""

from __future__ import annotations

import math

import numpy as np
from msgspec import Struct, field

from .block import Bools, Floats

#: Signals that vary from record to record in any healthy run.
VARYING = ("loss", "grad_norm", "update_ratio")
#: Values that differ by no more than this, relative, are one: logs print six digits (case A18).
SAME = 1e-6


class Watch(Struct):
    """What is remembered of one signal: its last value, for how many measurements it held, whether it ever varied.

    ``broken``: something was not finite, and no believable value came since. ``recent`` and ``newest`` are values before and
    since then, where a signal needs them.
    """

    last: float = math.nan
    held: int = 0
    varied: bool = False
    said: bool = False
    broken: bool = False
    recent: np.ndarray = field(default_factory=lambda: np.zeros(0))
    newest: list[float] = field(default_factory=list)


class Fault(Struct, frozen=True):
    """A notice about the measurement of one signal."""

    kind: str
    signal: str
    says: str


def same(value: float, last: float) -> bool:
    """Say whether a value is the last one again."""
    return value == last or abs(value - last) <= SAME * abs(last)


def repeated(values: Floats, last: float) -> Bools:
    """Say which values are the one before them again, the first of them ``last``."""
    return _alike(values, np.concatenate(([last], values[:-1])))


def longest(again: Bools, held: int) -> tuple[int, int]:
    """Return how long the longest run of one value is, and the last one, where the one before the first had gone on for ``held``."""
    begins = np.flatnonzero(~again)
    if not len(begins):
        return held + len(again), held + len(again)
    last = len(again) - int(begins[-1])
    first = held + int(begins[0]) if begins[0] else 1
    inner = int(np.diff(begins).max()) if len(begins) > 1 else 1
    return max(first, inner, last), last


def _alike(values: Floats, before: Floats) -> Bools:
    with np.errstate(invalid="ignore", over="ignore"):
        found: Bools = (values == before) | (np.abs(values - before) <= SAME * np.abs(before))
    return found


def look_at_all(watches: dict[str, Watch], name: str, values: Floats, dead_records: int) -> bool:
    """Take measurements in a row of which nothing is to be said, as :func:`look` would one after another; False if it must.

    They are finite and each differs from the one before, but for one now and then that is met twice: so it is nearly always.
    """
    if dead_records < 3 or not np.isfinite(values).all():
        return False
    watch = watches.setdefault(name, Watch())
    again = repeated(values, watch.last)
    held = 1
    if again.any():
        rows = np.flatnonzero(again)
        behind = rows[rows + 1 < len(values)] + 1
        # The third is compared with the first, as long as the second is the same.
        if again[0] or again[behind].any() or _alike(values[behind], values[behind - 2]).any():
            return False
        held = 2 if again[-1] else 1
    watch.varied = watch.varied or len(values) > held or not math.isnan(watch.last)
    watch.last, watch.held, watch.said = float(values[-held]), held, False
    return True


def look(watches: dict[str, Watch], name: str, value: float | None, dead_records: int) -> Fault | None:
    """Take one measurement of a signal that must vary; return a notice the first time that it does not."""
    if value is None or not math.isfinite(value):
        return None
    watch = watches.setdefault(name, Watch())
    if same(value, watch.last):
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
