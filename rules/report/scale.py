"""The y axis of a picture: which range it shows, linear or logarithmic, and where its ticks are."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from .thinning import Bools, Floats

#: The largest value over the usual lowest one from which the axis is logarithmic.
WIDE = 25.0
#: The decline at a run's beginning may leave the frame if the rest of the curve gains this share of the height by it.
GAIN = 0.4


@dataclass(frozen=True, slots=True)
class Axis:
    """The shown range ``low`` to ``high`` in the unit of the values; logarithmic where ``log``."""

    low: float
    high: float
    log: bool = False

    def place(self, values: Floats) -> Floats:
        """Return each finite value's height over the lower edge as a share; beyond the range it lies outside 0 to 1."""
        if self.log:
            low = math.log(self.low)
            with np.errstate(divide="ignore"):
                shares = (np.log(np.maximum(values, 0.0)) - low) / (math.log(self.high) - low)
            return np.where(values > 0, shares, 0.0)
        return np.asarray((values - self.low) / (self.high - self.low), dtype=np.float64)

    def ticks(self, most: int = 5) -> list[float]:
        """Return round values within the range, ascending."""
        if not self.log:
            return linear_ticks(self.low, self.high, most)
        powers = range(math.floor(math.log10(self.low)), math.ceil(math.log10(self.high)) + 1)
        for factors in ((1,), (1, 3), (1, 2, 5)):
            found = [factor * 10.0**power for power in powers for factor in factors]
            found = [value for value in found if self.low <= value <= self.high]
            if len(found) >= 2:
                return found[:: math.ceil(len(found) / (most + 1))]
        return linear_ticks(self.low, self.high, most)


def linear_ticks(low: float, high: float, most: int) -> list[float]:
    """Return about ``most``, at least two, multiples of 1, 2 or 5 times a power of ten within the range."""
    raw = (high - low) / max(most, 1)
    if not (raw > 0 and math.isfinite(raw)):
        return [low]
    power = 10.0 ** math.floor(math.log10(raw))
    found = [low]
    for factor in (10, 5, 2, 1, 0.5):
        step = factor * power
        if found[1:] and step < raw * 0.999:
            break
        first, last = math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9)
        found = [index * step for index in range(first, last + 1)]
    return found


def choose(values: Floats, early: Bools | None = None) -> Axis:
    """Return an axis for finite values.

    ``early`` says which of them belong to the first decline of a run and may lie above the frame.
    """
    if len(values) == 0:
        return Axis(0.0, 1.0)
    low, high = float(values.min()), float(values.max())
    positive = values[values > 0]
    if low >= 0 and len(positive) > 1 and high > 0:
        usual = float(np.quantile(positive, 0.05))
        if high > WIDE * usual:
            bottom = float(positive.min()) if low > 0 else max(float(positive.min()), high * 1e-12)
            return Axis(bottom / 1.2, high * 1.2, log=True)
    if early is not None and low >= 0 and not early.all() and high > low:
        top = float(values[~early].max())
        if (high - top) / (high - low) > GAIN:
            high = top
    if high <= low:
        room = abs(high) * 0.05 or 1.0
        return Axis(low - room, high + room)
    room = 0.06 * (high - low)
    return Axis(0.0 if 0 <= low < 0.15 * (high - low) else low - room, high + room)


def labels(ticks: list[float]) -> list[str]:
    """Return the texts of ticks, with as many digits as it takes to tell them apart."""
    for digits in range(4, 12):
        found = [short(value, digits) for value in ticks]
        if len(set(found)) == len(ticks):
            break
    return found


def short(value: float, digits: int = 4) -> str:
    """Return a number in few characters, with this many significant digits."""
    if not math.isfinite(value):
        return "NaN" if math.isnan(value) else ("+Inf" if value > 0 else "−Inf")
    if value == 0:
        return "0"
    size = abs(value)
    if size >= 1e6 or size < 1e-3:
        mantissa, _, power = f"{value:.{digits - 2}e}".partition("e")
        mantissa = mantissa.rstrip("0").rstrip(".")
        return f"{mantissa}e{int(power)}".replace("-", "−")
    if size >= 10 ** (digits - 1):
        return f"{value:,.0f}".replace("-", "−")
    return f"{value:.{digits}g}".replace("-", "−")


def whole(value: float) -> str:
    """Return a step or another count with its thousands apart."""
    return f"{round(value):,}"
