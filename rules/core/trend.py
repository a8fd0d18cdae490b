"""The loss's trend before something happened, and how far it can be trusted when it is extrapolated.

``loss = level + slope * (log step - centre)``: over the ranges that matter here a power law in all but name, and it bends the
right way. The fit is robust (medians of bins, Theil-Sen over the bins). The uncertainty has three parts: noise with its
autocorrelation, the slope's own error, and the error that the same extrapolation made when it was tried on the past: the
first half of the window predicting the second, and at least a third of the decline foretold, because loss curves flatten.
Without the last, any curve that bends would pass for a fault.
"""

from __future__ import annotations

import math

import numpy as np
from msgspec import Struct

from .baseline import ENOUGH, noise_of
from .block import Floats, Ints

#: Bins whose medians are fitted; 20 give 190 slopes, and a bin of bad values moves none of them far.
BINS = 20
#: Share of the foretold decline that may not come: the standard error of the slope's future, whatever its past.
FLATTENS = 0.33
#: A median needs 1.25 times the standard error of a mean.
MEDIAN_COST = 1.2533


class Trend(Struct, frozen=True, kw_only=True):
    """A fitted trend. ``noise`` is one record's robust standard deviation, ``correlation`` how many records count as one.

    ``level_error`` and ``slope_error`` are standard errors; ``bend`` is the tried error of extrapolating, per unit of
    log step beyond ``newest``.
    """

    level: float
    slope: float
    centre: float
    newest: float
    noise: float
    correlation: float
    level_error: float
    slope_error: float
    bend: float
    first_step: int
    last_step: int
    n: int

    def at(self, steps: Ints) -> Floats:
        """Return the expected loss at each step."""
        expected: Floats = self.level + self.slope * (_log(steps) - self.centre)
        return expected

    def doubt(self, steps: Ints) -> Floats:
        """Return the standard error that extrapolating alone brings at each step: none up to the newest record."""
        beyond: Floats = self.bend * np.maximum(_log(steps) - self.newest, 0.0)
        return beyond

    def error(self, step: float) -> float:
        """Return the standard error of the expected loss at ``step``."""
        place = math.log(max(step, 1.0))
        beyond = max(0.0, place - self.newest)
        return math.sqrt(
            self.level_error**2 + (self.slope_error * (place - self.centre)) ** 2 + (self.bend * beyond) ** 2
        )


class Shift(Struct, frozen=True):
    """How far the mean loss of some records lies above the trend, with its standard error, over ``n`` records."""

    excess: float
    error: float
    n: int


def _log(steps: Ints) -> Floats:
    return np.log(np.maximum(steps, 1).astype(np.float64))


def _line(places: Floats, values: Floats) -> tuple[float, float]:
    """Return slope and value at the mean place: Theil-Sen over the medians of equally filled bins."""
    parts = np.array_split(np.arange(len(places)), min(BINS, max(2, len(places) // 5)))
    x = np.array([np.mean(places[part]) for part in parts])
    y = np.array([np.median(values[part]) for part in parts])
    first, second = np.triu_indices(len(x), 1)
    run = x[second] - x[first]
    rising = run > 0
    slope = float(np.median((y[second] - y[first])[rising] / run[rising])) if rising.any() else 0.0
    centre = float(np.mean(places))
    return slope, float(np.median(values - slope * (places - centre)))


def fit(steps: Ints, losses: Floats) -> Trend | None:
    """Fit the trend of finite ``losses`` at ascending ``steps``, or return None where there are too few."""
    finite = np.isfinite(losses)
    steps, losses = steps[finite], losses[finite]
    n = len(steps)
    if n < 2 * ENOUGH:
        return None
    places = _log(steps)
    slope, level = _line(places, losses)
    centre = float(np.mean(places))
    residuals = losses - (level + slope * (places - centre))
    noise = noise_of(residuals, losses)
    # Winsorised, so that one spike among the residuals does not decide how correlated they are.
    calm = np.clip(residuals, -4 * noise, 4 * noise) if noise > 0 else residuals
    power = float(np.dot(calm, calm))
    lag = float(np.dot(calm[1:], calm[:-1])) / power if power > 0 else 0.0
    lag = min(max(lag, 0.0), 0.95)
    correlation = (1 + lag) / (1 - lag)
    effective = max(n / correlation, 2.0)
    level_error = MEDIAN_COST * noise / math.sqrt(effective)
    width = float(np.std(places))
    slope_error = level_error / width if width > 0 else 0.0
    return Trend(
        level=level,
        slope=slope,
        centre=centre,
        newest=float(places[-1]),
        noise=noise,
        correlation=correlation,
        level_error=level_error,
        slope_error=slope_error,
        bend=max(_bend(places, losses), FLATTENS * max(-slope, 0.0)),
        first_step=int(steps[0]),
        last_step=int(steps[-1]),
        n=n,
    )


def _bend(places: Floats, losses: Floats) -> float:
    half = len(places) // 2
    slope, level = _line(places[:half], losses[:half])
    centre = float(np.mean(places[:half]))
    missed = float(np.median(losses[half:] - (level + slope * (places[half:] - centre))))
    distance = float(np.mean(places[half:])) - centre
    return abs(missed) / distance if distance > 0 else 0.0


def shift(trend: Trend, steps: Ints, losses: Floats) -> Shift | None:
    """Compare the finite ``losses`` at ``steps`` with the trend; None where none is finite."""
    finite = np.isfinite(losses)
    steps, losses = steps[finite], losses[finite]
    if len(steps) == 0:
        return None
    excess = float(np.mean(losses - trend.at(steps)))
    own = trend.noise / math.sqrt(max(len(steps) / trend.correlation, 1.0))
    return Shift(excess, math.hypot(own, trend.error(float(np.mean(steps)))), len(steps))
