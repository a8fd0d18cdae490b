"""Made-up losses of healthy runs of many kinds, and faults to plant into them. All a function of a kind and a seed.

Levels, declines and noise lie where those of published pre-training and fine-tuning logs lie: a loss of 2 to 4 that falls by a power law,
batch noise of 0.3 to 3 % of the level. A kind changes one thing, so that a rule that is fooled says by what.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from trainwarden.record import Step
from trainwarden.rules.core.inputs import Start
from trainwarden.rules.replay.attempts import Placed

Floats = NDArray[np.float64]


@dataclass(frozen=True)
class Curve:
    """The losses of one run, one a record; a record covers ``stride`` steps. ``noise`` is the batch noise as logged, one deviation."""

    losses: Floats
    noise: float
    stride: int = 1

    def lines(self, name: str) -> Iterator[Placed]:
        """Yield the run's records as replay reads them."""
        start = Start(name, name, 0, f"{name}-0")
        for place, loss in enumerate(self.losses.tolist(), start=1):
            step = place * self.stride
            yield start, 0, Step(seq=place, step=step, time=1.7e9 + step, stride=self.stride, signals={"loss": loss})


def power_law(chance: np.random.Generator, n: int) -> Floats:
    """Return a decline without noise: floor, height and exponent by chance, after a warm-up of some hundred steps."""
    steps = np.arange(1, n + 1)
    floor, height, exponent = chance.uniform(1.8, 3.0), chance.uniform(4, 8), chance.uniform(0.25, 0.6)
    curve: Floats = floor + height * (1 + steps / chance.uniform(20, 200)) ** -exponent
    return curve


def noisy(
    chance: np.random.Generator, n: int, draw: Callable[[int], Floats] | None = None, sd: float | None = None
) -> Curve:
    """Return a decline with independent noise of some 0.3 to 3 % of the level."""
    curve = power_law(chance, n)
    sd = float(np.exp(chance.uniform(np.log(0.003), np.log(0.03)))) * float(curve[-1]) if sd is None else sd
    return Curve(curve + sd * (chance.standard_normal(n) if draw is None else draw(n)), sd)


def smoothed(values: Floats, beta: float) -> Floats:
    """Return a moving average as loggers write it."""
    found = np.empty_like(values)
    mean = values[0]
    for place, value in enumerate(values):
        mean = beta * mean + (1 - beta) * value
        found[place] = mean
    return found


def _ema(chance: np.random.Generator, n: int, beta: float) -> Curve:
    made = noisy(chance, n)
    return Curve(smoothed(made.losses, beta), made.noise * math.sqrt((1 - beta) / (1 + beta)))


def _ar(chance: np.random.Generator, n: int, phi: float) -> Curve:
    made = noisy(chance, n)
    drift, noise = 0.0, chance.standard_normal(n)
    for place in range(n):
        drift = phi * drift + math.sqrt(1 - phi * phi) * noise[place]
        noise[place] = drift
    return Curve(power_law(chance, n) + made.noise * noise, made.noise)


def _saw_tooth(chance: np.random.Generator, n: int) -> Curve:
    """Running mean of the epoch so far, which begins anew with each."""
    made = noisy(chance, n)
    epoch = int(chance.integers(200, 1500))
    parts = [made.losses[first : first + epoch] for first in range(0, n, epoch)]
    return Curve(np.concatenate([np.cumsum(part) / np.arange(1, len(part) + 1) for part in parts]), made.noise / 5)


def _rounded(chance: np.random.Generator, n: int, quantum: float) -> Curve:
    made = noisy(chance, n)
    return Curve(np.round(made.losses / quantum) * quantum, max(made.noise, quantum / 2))


def _strided(chance: np.random.Generator, n: int, stride: int) -> Curve:
    made = noisy(chance, n * stride)
    return Curve(made.losses.reshape(n, stride).mean(axis=1), made.noise / math.sqrt(stride), stride)


def _sparse(chance: np.random.Generator, n: int, stride: int) -> Curve:
    made = noisy(chance, n * stride)
    return Curve(made.losses[stride - 1 :: stride], made.noise, stride)


def _early(chance: np.random.Generator, n: int) -> Curve:
    made = noisy(chance, n)
    steps = np.arange(n)
    return Curve(made.losses + 7 * np.exp(-steps / chance.uniform(30, 150)), made.noise)


def _epochs(chance: np.random.Generator, n: int) -> Curve:
    """Data that is seen again: a drop at each epoch."""
    made = noisy(chance, n)
    epoch = int(chance.integers(300, 1200))
    drops = np.floor(np.arange(n) / epoch) * chance.uniform(0.02, 0.2)
    return Curve(np.maximum(made.losses - drops, 0.2 + 0.1 * made.losses), made.noise)


def _batch_size(chance: np.random.Generator, n: int, factor: float) -> Curve:
    made = noisy(chance, n)
    trend = power_law(chance, n)
    change = int(chance.integers(n // 3, 2 * n // 3))
    noise = made.noise * np.where(np.arange(n) < change, 1.0, factor)
    return Curve(trend + noise * chance.standard_normal(n), made.noise)


def _hump(chance: np.random.Generator, n: int) -> Curve:
    """The rate reaches its height and the loss rises a little before it falls on."""
    made = noisy(chance, n)
    middle, width = chance.uniform(100, 400), chance.uniform(30, 100)
    hump = chance.uniform(0.02, 0.08) * made.losses[-1] * np.exp(-(((np.arange(n) - middle) / width) ** 2))
    return Curve(made.losses + 7 * np.exp(-np.arange(n) / 60) + hump, made.noise)


def _cosine(chance: np.random.Generator, n: int) -> Curve:
    made = noisy(chance, n)
    return Curve(made.losses - 0.15 * (1 - np.cos(np.pi * np.arange(n) / n)) / 2, made.noise)


def _decay(chance: np.random.Generator, n: int) -> Curve:
    """A constant rate and a short decay at the end, in which the loss falls fast."""
    made = noisy(chance, n)
    return Curve(made.losses - 0.3 * np.clip((np.arange(n) - 0.8 * n) / (0.2 * n), 0, 1), made.noise)


def _small(chance: np.random.Generator, n: int) -> Curve:
    """Fine-tuning: from 1.5 towards nothing, with noise in proportion to the level."""
    level = 0.03 + 1.4 * np.exp(-np.arange(n) / chance.uniform(100, n / 2))
    sd = chance.uniform(0.1, 0.5)
    return Curve(level * np.exp(sd * chance.standard_normal(n)), float(sd * level[n // 2]))


def _around_zero(chance: np.random.Generator, n: int) -> Curve:
    """A policy's loss: small, of either sign."""
    sd = chance.uniform(0.005, 0.1)
    return Curve(sd * chance.standard_normal(n) + 0.02 * np.sin(np.arange(n) / chance.uniform(100, 1000)), float(sd))


def _domains(chance: np.random.Generator, n: int) -> Curve:
    """A batch is of one domain: some are harder."""
    made = noisy(chance, n)
    share, harder = chance.uniform(0.03, 0.5), chance.uniform(0.1, 0.35)
    return Curve(made.losses * (1 + harder * (chance.random(n) < share)), made.noise + made.losses[-1] * harder / 2)


def _plateaus(chance: np.random.Generator, n: int) -> Curve:
    """Nothing is learnt for long, then something at once."""
    made = noisy(chance, n)
    level = np.full(n, 6.0)
    for place in sorted(chance.integers(n // 10, n, size=3)):
        level[place:] -= chance.uniform(0.3, 1.2)
    return Curve(smoothed(level, 0.95) + made.noise * chance.standard_normal(n), made.noise)


def _waves(chance: np.random.Generator, n: int) -> Curve:
    """Data that is not well mixed: slow waves of the size of the noise."""
    made = noisy(chance, n)
    waves = sum(
        np.sin(2 * np.pi * np.arange(n) / period + chance.uniform(0, 7)) for period in chance.uniform(150, 3000, 3)
    )
    return Curve(made.losses + 0.5 * made.noise * waves, made.noise * 1.2)


def _skewed(chance: np.random.Generator, n: int) -> Curve:
    return noisy(chance, n, lambda size: chance.lognormal(0, 0.8, size) - math.exp(0.32))


def _heavy(chance: np.random.Generator, n: int, freedom: float) -> Curve:
    return noisy(chance, n, lambda size: np.clip(chance.standard_t(freedom, size), -40, 40))


Make = Callable[[np.random.Generator, int], Curve]
#: Kinds of healthy runs, and how long such a run is in records (about).
HEALTHY: dict[str, tuple[Make, int]] = {
    "gaussian": (noisy, 6000),
    "calm (0.05 %)": (lambda chance, n: noisy(chance, n, sd=0.0012), 6000),
    "heavy tails (t3)": (lambda chance, n: _heavy(chance, n, 3), 6000),
    "heavy tails (t2)": (lambda chance, n: _heavy(chance, n, 2), 6000),
    "skewed (lognormal)": (_skewed, 6000),
    "EMA 0.9": (lambda chance, n: _ema(chance, n, 0.9), 6000),
    "EMA 0.99": (lambda chance, n: _ema(chance, n, 0.99), 6000),
    "AR(1) 0.5": (lambda chance, n: _ar(chance, n, 0.5), 6000),
    "AR(1) 0.9": (lambda chance, n: _ar(chance, n, 0.9), 6000),
    "AR(1) 0.98": (lambda chance, n: _ar(chance, n, 0.98), 6000),
    "saw-tooth mean": (_saw_tooth, 6000),
    "bf16 (1/64)": (lambda chance, n: _rounded(chance, n, 2**-6), 6000),
    "two decimals": (lambda chance, n: _rounded(chance, n, 0.01), 6000),
    "stride 10, means": (lambda chance, n: _strided(chance, n, 10), 3000),
    "stride 100, means": (lambda chance, n: _strided(chance, n, 100), 1000),
    "stride 50, single": (lambda chance, n: _sparse(chance, n, 50), 2000),
    "early decline": (_early, 4000),
    "epoch drops": (_epochs, 6000),
    "batch size x4": (lambda chance, n: _batch_size(chance, n, 0.5), 6000),
    "batch size / 4": (lambda chance, n: _batch_size(chance, n, 2.0), 6000),
    "warm-up hump": (_hump, 4000),
    "cosine": (_cosine, 6000),
    "decay at the end": (_decay, 6000),
    "small (fine-tuning)": (_small, 3000),
    "around zero": (_around_zero, 4000),
    "domains": (_domains, 6000),
    "plateaus": (_plateaus, 6000),
    "waves": (_waves, 6000),
    "short (150)": (noisy, 150),
    "short (400)": (_early, 400),
    "long": (noisy, 60_000),
    "long, t3": (lambda chance, n: _heavy(chance, n, 3), 60_000),
}


def healthy(kind: str, seed: int) -> Curve:
    """Return a healthy run."""
    make, n = HEALTHY[kind]
    return make(np.random.default_rng([seed, *kind.encode()]), n)


#: Kinds into which faults are planted.
CARRIERS = (
    "gaussian",
    "heavy tails (t3)",
    "EMA 0.9",
    "AR(1) 0.9",
    "bf16 (1/64)",
    "stride 10, means",
    "short (400)",
    "small (fine-tuning)",
)


@dataclass(frozen=True)
class Planted:
    """A run with one fault: where it begins and ends (records), and whether a person must be told of it at night."""

    curve: Curve
    first: int
    end: int


def spike(curve: Curve, chance: np.random.Generator, size: float, records: int) -> Planted:
    """Plant a spike of so many deviations that decays over so many records; of one record, it is one value."""
    first = int(chance.integers(len(curve.losses) // 3, max(len(curve.losses) * 3 // 4, len(curve.losses) // 3 + 1)))
    end = min(first + records, len(curve.losses))
    losses = curve.losses.copy()
    losses[first:end] += size * curve.noise * np.exp(-np.arange(end - first) / max(records / 2, 1))
    return Planted(Curve(losses, curve.noise, curve.stride), first, end)


def shift(curve: Curve, chance: np.random.Generator, share: float) -> Planted:
    """Plant a rise by a share of the level that stays."""
    first = int(chance.integers(len(curve.losses) // 3, len(curve.losses) // 2))
    losses = curve.losses.copy()
    losses[first:] *= 1 + share
    return Planted(Curve(losses, curve.noise, curve.stride), first, len(losses))


def divergence(curve: Curve, chance: np.random.Generator, records: int) -> Planted:
    """Plant a rise that doubles its pace, to twice the level after so many records, where it stays."""
    n = len(curve.losses)
    first = int(chance.integers(n // 3, n // 2))
    rise = np.clip((np.arange(n) - first) / min(records, n - first - 1), 0, 1) ** 2
    return Planted(Curve(curve.losses * (1 + rise), curve.noise, curve.stride), first, n)


def nonfinite(curve: Curve, chance: np.random.Generator) -> Planted:
    """Plant NaN from a record on."""
    first = int(chance.integers(len(curve.losses) // 3, len(curve.losses) // 2))
    losses = curve.losses.copy()
    losses[first:] = np.nan
    return Planted(Curve(losses, curve.noise, curve.stride), first, len(losses))


Plant = Callable[[Curve, np.random.Generator], Planted]


def _spike(size: float, records: int) -> Plant:
    return lambda curve, chance: spike(curve, chance, size, records)


def _shift(share: float) -> Plant:
    return lambda curve, chance: shift(curve, chance, share)


def _divergence(records: int) -> Plant:
    return lambda curve, chance: divergence(curve, chance, records)


#: Faults by name.
FAULTS: dict[str, Plant] = {
    **{
        f"spike of {size:g} sd, {records} records": _spike(size, records)
        for records in (1, 3, 10, 50, 200)
        for size in (3.0, 5.0, 8.0, 20.0)
    },
    **{f"shift by {100 * share:g} %": _shift(share) for share in (0.007, 0.015, 0.03, 0.05)},
    **{f"divergence over {records} records": _divergence(records) for records in (100, 500, 2000)},
    "NaN": nonfinite,
}


def planted(fault: str, kind: str, seed: int) -> Planted:
    """Return a run of this kind with this fault."""
    return FAULTS[fault](healthy(kind, seed), np.random.default_rng([seed, *fault.encode()]))
