"""Is a signal suddenly written down as an exact multiple of what it was, within one start (design §4.9; case A30)?

A log of one attempt may be glued together, a callback may change the accumulation, or a sum may become a mean. That is told from
a fault of the training by four things at once, each as exact as the noise allows: the factor is one that such changes make, it is
met from one record to the next, the relative noise is what it was, and the slope too. What else is written down, the gradient
norm beside a loss, must stay or move by a factor of the same family. A loss that a fault has doubled keeps neither its noise nor
an exact factor for tens of records.

From the first odd record on it is a candidate. It is dropped as soon as the records contradict it, and believed once the factor
is known well enough; ``LIMIT`` records decide. Nothing is judged here.
"""

from __future__ import annotations

import math
from typing import Literal

import numpy as np
from msgspec import Struct, field

from .block import Floats

#: Records before a candidate that tell level, slope and noise, and the fewest that do.
BEFORE, FEWEST = 200, 32
#: Records after which a candidate must be decided, and the fewest that believe it.
LIMIT, SOONEST = 100, 40
#: After so many measurements level and noise are looked up anew.
EVERY = 32
#: No factor is nearer to one than twice this, as a logarithm: nothing within it is odd.
NEAREST = 0.22
#: Relative noise above which no factor can be known well enough within ``LIMIT`` records.
NOISIEST = 0.1
#: Standard error of the logarithm of a factor of two that is allowed after ``LIMIT`` records; in proportion before, and to the
#: logarithm of a larger factor: the farther it is from one, the fewer faults reach it in one record.
ERROR = 0.013
#: Standard errors that the factor, its noise and its slope may be off: to be dropped, and to be believed.
DROPPED, BELIEVED = 4.5, 2.0
#: Records before a candidate that tell a bend, and the standard errors from which one shows.
BENDS, BEND = 100, 1.5
#: What no rounding explains, relative.
SLACK = 0.002
#: The standard error of the logarithm of a standard deviation of n clipped residuals, times the root of n.
NOISE_ERROR = 0.9
#: Accumulation steps, ranks and tokens multiply or divide by these.
WHOLE = (2.0, 3.0, 4.0, 6.0, 8.0, 12.0, 16.0, 24.0, 32.0, 48.0, 64.0, 128.0, 256.0, 512.0, 1024.0)
#: A norm of one shard out of n is too small by the root of n (case D05).
ROOTS = (math.sqrt(2), math.sqrt(8), math.sqrt(32), math.sqrt(128))
#: Fewest records that believe a root where only whole numbers are expected. The other signal must have moved by it as well.
ROOT_SOONEST = 60


class Scale(Struct):
    """What is remembered of one signal: its newest values, those of the other signal beside them, and where it should be.

    ``behind`` of them belong to the candidate, none where there is none. ``inside``: the newest one was where it should be.
    ``level`` and ``noise`` are of logarithms; NaN, and then no bounds, where the signal cannot be followed.
    """

    values: np.ndarray = field(default_factory=lambda: np.zeros(0))
    others: np.ndarray = field(default_factory=lambda: np.zeros(0))
    seen: int = 0
    level: float = math.nan
    noise: float = math.nan
    low: float = 0.0
    high: float = math.inf
    inside: bool = True
    behind: int = 0


class Ruling(Struct, frozen=True):
    """What changed at ``row`` of the values: a candidate began, was dropped, or is believed since ``records`` records.

    ``factor`` is the signal's, ``other`` the other one's, 1 where nothing is known of it.
    """

    row: int
    kind: Literal["began", "dropped", "believed"]
    factor: float = 1.0
    other: float = 1.0
    records: int = 0


def follow(scale: Scale, values: Floats, others: Floats, roots: bool) -> list[Ruling]:
    """Take the signal's measured values, with the other signal's (NaN where unknown), and say at which rows what changed.

    ``roots``: the roots are as likely as the whole numbers. How the values are cut into calls makes no difference.
    """
    found: list[Ruling] = []
    row, size = 0, len(values)
    while row < size:
        if scale.behind:
            ruling = _next(scale, row, float(values[row]), float(others[row]), roots)
            if ruling is not None:
                found.append(ruling)
            row += 1
            continue
        end = min(size, row + EVERY - scale.seen % EVERY)
        part = values[row:end]
        # Nearly always all are where they should be, which a NaN is not.
        if scale.low < part.min() and part.max() < scale.high:
            _take(scale, part, others[row:end])
            row = end
            continue
        odd = row + int(np.argmin((part > scale.low) & (part < scale.high)))
        if odd > row:
            _take(scale, values[row:odd], others[row:odd])
        value = float(values[odd])
        if scale.inside and _likely(scale, value):
            found.append(Ruling(odd, "began"))
            _add(scale, value, float(others[odd]))
        else:
            _take(scale, values[odd : odd + 1], others[odd : odd + 1])
        scale.inside = False
        row = odd + 1
    return found


def _take(scale: Scale, values: Floats, others: Floats) -> None:
    """Remember values without a candidate; each ``EVERY`` of them renew level and noise."""
    scale.inside = True
    scale.values = np.concatenate((scale.values, values))[-BEFORE:]
    scale.others = np.concatenate((scale.others, others))[-BEFORE:]
    scale.seen += len(values)
    if scale.seen % EVERY == 0:
        _look_up(scale)


def _look_up(scale: Scale) -> None:
    newest = scale.values[-FEWEST:]
    newest = np.sort(newest[(newest > 0) & (newest < np.inf)])
    scale.level = scale.noise = math.nan
    scale.low, scale.high = 0.0, math.inf
    if len(newest) < FEWEST - FEWEST // 4:
        return
    middle = len(newest) // 2
    level = math.log(newest[middle])
    noise = 1.4826 * float(np.sort(np.abs(newest / newest[middle] - 1))[middle])
    if 0 < noise <= NOISIEST:
        scale.level, scale.noise = level, noise
        reach = max(NEAREST, 6 * noise)
        scale.low, scale.high = math.exp(level - reach), math.exp(level + reach)


def _logs(values: Floats) -> Floats:
    with np.errstate(invalid="ignore", divide="ignore"):
        return np.log(np.where((values > 0) & (values < np.inf), values, np.nan))


def _add(scale: Scale, value: float, beside: float) -> None:
    """Add a value to the candidate."""
    scale.values, scale.others = np.append(scale.values, value), np.append(scale.others, beside)
    scale.behind += 1


#: The factors' logarithms.
_FACTORS = tuple(math.log(one) for one in (*WHOLE, *ROOTS))
_ROOTS = frozenset(math.log(one) for one in ROOTS)


def _likely(scale: Scale, value: float) -> bool:
    if not 0 < value < math.inf or math.isnan(scale.level):
        return False
    size = abs(math.log(value) - scale.level)
    return any(abs(size - factor) <= 5 * scale.noise + 0.05 for factor in _FACTORS)


def _next(scale: Scale, row: int, value: float, beside: float, roots: bool) -> Ruling | None:
    """Take one value of a candidate; return what it decides."""
    if not 0 < value < math.inf:
        return _drop(scale, row)
    _add(scale, value, beside)
    # One by one while a page may be near for a log that averages, then every fifth.
    if scale.behind > 10 and scale.behind % 5:
        return None
    answer = _weigh(scale.values, scale.others, scale.behind, roots)
    if answer is None or (answer == "open" and scale.behind >= LIMIT):
        return _drop(scale, row)
    if answer == "open":
        return None
    factor, other = answer
    ruling = Ruling(row, "believed", factor, other, scale.behind)
    _begin(scale, scale.behind)
    scale.inside = True
    return ruling


def _drop(scale: Scale, row: int) -> Ruling:
    _begin(scale, BEFORE)
    return Ruling(row, "dropped")


def _begin(scale: Scale, kept: int) -> None:
    """End the candidate: the level is looked up anew after the next ``EVERY`` values."""
    scale.behind = scale.seen = 0
    scale.level = scale.noise = math.nan
    scale.low, scale.high = 0.0, math.inf
    scale.values, scale.others = scale.values[-kept:], scale.others[-kept:]


class _Jump(Struct, frozen=True):
    """A jump of a logarithm: its size with its standard error, and how unlike its two sides are, in standard errors."""

    size: float
    error: float
    noise: float
    slope: float


def _jump(values: Floats, behind: int) -> _Jump | None:
    """Fit one slope and one jump to the values, the last ``behind`` of which lie after it; None where nothing can be said.

    A young run's curve bends: where it shows, the slope before the jump may change, or the bend would count as a part of the jump.
    """
    n = len(values)
    known = np.isfinite(values)
    after = np.arange(n) >= n - behind
    before = int(np.count_nonzero(known & ~after))
    newer = int(np.count_nonzero(known & after))
    if before < FEWEST or not newer:
        return None
    place = (np.arange(n) - (n - behind))[known] / BEFORE
    design = np.stack((np.ones(len(place)), place, after[known].astype(np.float64)), axis=1)
    aim = values[known]
    inverse = np.linalg.inv(design.T @ design)
    fitted = design @ (inverse @ (design.T @ aim))
    if before >= BENDS:
        bent = np.column_stack((design, np.minimum(place, 0.0) ** 2))
        inverse_bent = np.linalg.inv(bent.T @ bent)
        bend = inverse_bent @ (bent.T @ aim)
        rest = aim - bent @ bend
        if abs(float(bend[3])) > BEND * float(np.std(rest)) * math.sqrt(float(inverse_bent[3, 3])):
            design, inverse, fitted = bent, inverse_bent, bent @ bend
    spread = 1.4826 * float(np.median(np.abs(aim - fitted)))
    for _ in range(2):  # outliers count as the largest of the others
        aim = fitted + np.clip(aim - fitted, -4 * spread, 4 * spread)
        fitted = design @ (inverse @ (design.T @ aim))
    rest = aim - fitted
    old, new = rest[:before], rest[before:]
    sd, sd_new = float(np.std(old)), float(np.std(new))
    if sd <= 0:
        return None
    power = float(np.dot(old, old))
    lag = min(max(float(np.dot(old[1:], old[:-1])) / power, 0.0), 0.95)
    coefficients = inverse @ (design.T @ aim)
    stretch = math.sqrt((1 + lag) / (1 - lag))
    error = stretch * sd * math.sqrt(float(inverse[2, 2]))
    slope = noise = 0.0
    if newer >= 10:
        noise = abs(math.log(max(sd_new, 1e-12) / sd)) / (NOISE_ERROR * stretch * math.sqrt(1 / newer + 1 / before))
        half = newer // 2
        apart = float(np.mean(new[half:]) - np.mean(new[:half]))
        slope = abs(apart) / (stretch * sd * math.sqrt(4 / newer))
    return _Jump(float(coefficients[2]), error, noise, slope)


def _weigh(values: Floats, others: Floats, behind: int, roots: bool) -> tuple[float, float] | Literal["open"] | None:
    """Return the two factors, ``open`` while nothing contradicts and too little is known, or None where something does."""
    jump = _jump(_logs(values), behind)
    if jump is None or max(jump.noise, jump.slope) > DROPPED:
        return None
    size = abs(jump.size)
    factor = min(_FACTORS, key=lambda one: abs(one - size))
    if abs(size - factor) > DROPPED * jump.error + SLACK:
        return None
    other = _jump(_logs(others), behind)
    moved = math.copysign(factor, jump.size)
    if other is not None and math.isnan(_kin(other, moved, DROPPED)):
        return None
    odd = factor in _ROOTS and not roots
    if (
        behind < (ROOT_SOONEST if odd else SOONEST)
        or jump.error > ERROR * max(1.0, size / math.log(2)) * behind / LIMIT
    ):
        return "open"
    if max(jump.noise, jump.slope) > BELIEVED or abs(size - factor) > BELIEVED * jump.error + SLACK:
        return "open"
    kin = 0.0 if other is None else _kin(other, moved, BELIEVED)
    if math.isnan(kin) or (odd and kin != moved):
        return "open"
    return math.exp(moved), math.exp(kin)


def _kin(other: _Jump, factor: float, errors: float) -> float:
    """Return by which logarithm of a factor the other signal moved: none, the same or its root; NaN for neither."""
    found = min((0.0, factor, factor / 2), key=lambda one: abs(one - other.size))
    return found if abs(found - other.size) <= errors * other.error + SLACK else math.nan
