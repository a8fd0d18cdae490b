"""What others do, in our own words: rules that published trainers and monitors judge a loss or a gradient norm by.

Each rule takes the measured values of one run in order and says at which of them it would raise its hand. They were written from a
description of each rule, with the constants that it ships with; nothing is tuned. Unless noted, a rule looks at the loss of each
record, and a value that is not finite raises no hand.
"""

from __future__ import annotations

import math
import statistics
from collections import deque
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np

#: (losses, gradient norms or None) -> where the rule alarms. Both have one number a record.
Judge = Callable[[Sequence[float], Sequence[float] | None], list[bool]]


class Rule(NamedTuple):
    """A peer's rule. ``stops`` says that the peer ends the run on an alarm, which is a page by itself."""

    name: str
    judge: Judge
    stops: bool = False


class _Trailing:
    """Mean and deviation of the last ``size`` values."""

    def __init__(self, size: int) -> None:
        self.values: deque[float] = deque(maxlen=size)

    @property
    def full(self) -> bool:
        return len(self.values) == self.values.maxlen

    def mean(self) -> float:
        return math.fsum(self.values) / len(self.values)

    def deviation(self, less: int = 0) -> float:
        """Return the standard deviation; ``less=1`` for that of a sample."""
        mean = self.mean()
        return math.sqrt(math.fsum((x - mean) ** 2 for x in self.values) / (len(self.values) - less))

    def push(self, value: float) -> None:
        if math.isfinite(value):
            self.values.append(value)


def ema_ratio(losses: Sequence[float], norms: Sequence[float] | None) -> list[bool]:
    """Loss above 1.5 times its moving average (0.98) at three records in a row."""
    mean = weight = 0.0
    row, out = 0, []
    for x in losses:
        if math.isfinite(x):
            mean, weight = 0.98 * mean + 0.02 * x, 0.98 * weight + 0.02
        row = row + 1 if weight and x > 1.5 * mean / weight else 0
        out.append(row >= 3)
    return out


def megatron_spiky(losses: Sequence[float], norms: Sequence[float] | None) -> list[bool]:
    """Ten times the largest of the first hundred values (Megatron-LM's rerun machine, spiky loss)."""
    largest, seen, out = 0.0, 0, []
    for x in losses:
        if not math.isfinite(x):
            out.append(False)
        elif seen < 100:
            largest, seen = max(largest, abs(x)), seen + 1
            out.append(False)
        else:
            out.append(abs(x) >= 10 * largest)
    return out


def kill_loss_spike(losses: Sequence[float], norms: Sequence[float] | None) -> list[bool]:
    """More than four values in a row at twice the window's mean, or half of a later window above the early cap (llm-foundry)."""
    size = max(100, len(losses) // 20)
    window = _Trailing(size)
    row, cap, out = 0, math.inf, []
    for step, x in enumerate(losses):
        alarm = False
        if window.full:
            row = row + 1 if x >= 2 * window.mean() else 0
            alarm = row > 4
            if cap == math.inf:
                cap = min(max(window.values), 10.0)
            if not alarm and step >= 2 * size:
                alarm = sum(value > cap for value in window.values) >= size / 2
        window.push(x)
        out.append(alarm)
    return out


def _six_sigma(values: Sequence[float], size: int, least: int, sigmas: float, less: int) -> list[bool]:
    window, out = _Trailing(size), []
    for x in values:
        far = False
        if len(window.values) >= least:
            spread = window.deviation(less)
            far = spread >= 1e-10 and x > window.mean() + sigmas * spread
        out.append(far)
        window.push(x)
    return out


def _either(first: list[bool], second: list[bool] | None) -> list[bool]:
    return first if second is None else [one or other for one, other in zip(first, second, strict=True)]


def olmo_skip_step(losses: Sequence[float], norms: Sequence[float] | None) -> list[bool]:
    """Six sigma of the last 128, in the loss or the gradient norm, from 64 values on (OLMo-core's skip-step)."""
    grad = None if norms is None else _six_sigma(norms, 128, 64, 6.0, 1)
    return _either(_six_sigma(losses, 128, 64, 6.0, 1), grad)


def olmo_spike_score(losses: Sequence[float], norms: Sequence[float] | None) -> list[bool]:
    """Seven sigma off the mean of the last 1,000, to either side (OLMo 2's spike score)."""
    window, out = _Trailing(1000), []
    for x in losses:
        out.append(window.full and abs(x - window.mean()) >= 7 * window.deviation())
        window.push(x)
    return out


def levanter_clip_update(losses: Sequence[float], norms: Sequence[float] | None) -> list[bool]:
    """Three sigma of the last 128 gradient norms (Levanter's update clipping); silent without norms."""
    return [False] * len(losses) if norms is None else _six_sigma(norms, 128, 64, 3.0, 0)


def metaseq_ewm(losses: Sequence[float], norms: Sequence[float] | None) -> list[bool]:
    """1.5 times an average of span 9 that stands still while it is exceeded (metaseq)."""
    mean, out = math.nan, []
    for x in losses:
        if not math.isfinite(x):
            out.append(False)
            continue
        mean = x if math.isnan(mean) else mean
        over = x / mean > 1.5
        if not over:
            mean += 0.2 * (x - mean)
        out.append(over)
    return out


def lightning_spikes(losses: Sequence[float], norms: Sequence[float] | None) -> list[bool]:
    """Twice the running mean away, and above the last value; not finite alarms too (Lightning's spike detection, window 10)."""
    window, last, out = _Trailing(10), math.nan, []
    for x in losses:
        if not math.isfinite(x):
            out.append(True)
            continue
        mean = window.mean() if window.values else x
        spike = x > last and abs(x - mean) >= 2.0 * abs(mean)
        if not spike:
            window.push(x)
            last = x
        out.append(spike)
    return out


def flagscale(losses: Sequence[float], norms: Sequence[float] | None) -> list[bool]:
    """A fifth above the last accepted value (FlagScale)."""
    last, out = math.nan, []
    for x in losses:
        spike = math.isinf(x) or (last != 0 and (x - last) / last >= 0.2)
        last = last if spike else x
        out.append(spike)
    return out


def zclip(losses: Sequence[float], norms: Sequence[float] | None) -> list[bool]:
    """2.5 sigma above fading mean and variance of the gradient norm, outliers taken in shortened (ZClip); silent without norms."""
    out = [False] * len(losses)
    if norms is None:
        return out
    warm: list[float] = []
    mean = variance = 0.0
    for step, g in enumerate(norms):
        if not math.isfinite(g):
            continue
        if len(warm) < 25:
            warm.append(g)
            mean, variance = statistics.fmean(warm), statistics.pvariance(warm)
            continue
        spread = math.sqrt(variance)
        z = (g - mean) / (spread + 1e-6)
        out[step] = z > 2.5
        taken = mean + 2.5**2 / z * spread if z > 2.5 else g
        mean = 0.97 * mean + 0.03 * taken
        variance = 0.97 * variance + 0.03 * (taken - mean) ** 2
    return out


def llmc_z(losses: Sequence[float], norms: Sequence[float] | None) -> list[bool]:
    """Five sigma within the last 128, itself included (llm.c's outlier detector, in loss or gradient norm)."""

    def far(values: Sequence[float]) -> list[bool]:
        window, out = _Trailing(128), []
        for x in values:
            window.push(x)
            spread = window.deviation() if window.full else 0.0
            out.append(spread > 0 and (x - window.mean()) / spread > 5.0)
        return out

    return _either(far(losses), None if norms is None else far(norms))


def trainscope_cusum(losses: Sequence[float], norms: Sequence[float] | None) -> list[bool]:
    """A cumulative sum of robust deviations beyond one, up or down, that reaches six (trainscope)."""
    window: deque[float] = deque(maxlen=200)
    high = low = 0.0
    out = []
    for x in losses:
        alarm = False
        if len(window) >= 30 and math.isfinite(x):
            values = np.array(window)
            middle = float(np.median(values))
            spread = 1.4826 * float(np.median(np.abs(values - middle)))
            if spread > 0:
                z = (x - middle) / spread
                high, low = max(0.0, high + z - 1.0), min(0.0, low + z + 1.0)
                alarm = high >= 6.0 or low <= -6.0
                if alarm:
                    high = low = 0.0
        if math.isfinite(x):
            window.append(x)
        out.append(alarm)
    return out


def msprobe(losses: Sequence[float], norms: Sequence[float] | None) -> list[bool]:
    """Half above the moving average (0.99) of the gradient norm, or of the loss where there is none (msprobe's monitor)."""
    mean, out = math.nan, []
    for x in losses if norms is None else norms:
        out.append(x > 1.5 * mean)
        if math.isfinite(x):
            mean = abs(x) if math.isnan(mean) else 0.99 * mean + 0.01 * abs(x)
    return out


def spam_gradient(losses: Sequence[float], norms: Sequence[float] | None) -> list[bool]:
    """Fifty times the mean so far of the gradient norm (a spike as SPAM counts them); silent without norms."""
    out = [False] * len(losses)
    total, seen = 0.0, 0
    for step, g in enumerate(norms or ()):
        out[step] = seen >= 25 and g > 50 * total / seen
        if math.isfinite(g):
            total, seen = total + g, seen + 1
    return out


def handbook(losses: Sequence[float], norms: Sequence[float] | None) -> list[bool]:
    """Seven sigma of the last 1,000 ordinary values at three records in a row: what a careful person writes."""
    window, row, out = _Trailing(1000), 0, []
    for x in losses:
        far = len(window.values) >= 100 and x > window.mean() + 7 * window.deviation()
        row = row + 1 if far else 0
        if not far:
            window.push(x)
        out.append(row >= 3)
    return out


RULES = (
    Rule("loss > 1.5 EMA(0.98), 3 records", ema_ratio),
    Rule("llm-foundry KillLossSpike", kill_loss_spike, stops=True),
    Rule("Lightning SpikeDetection", lightning_spikes),
    Rule("Megatron-LM spiky loss (10x)", megatron_spiky),
    Rule("OLMo-core 6 sigma, loss or grad", olmo_skip_step),
    Rule("OLMo 2 spike score, 7 sigma of 1,000", olmo_spike_score),
    Rule("Levanter clip-update (gradient)", levanter_clip_update),
    Rule("FlagScale 0.2", flagscale),
    Rule("trainscope CUSUM", trainscope_cusum),
    Rule("metaseq EWM 1.5", metaseq_ewm),
    Rule("ZClip (gradient)", zclip),
    Rule("llm.c z > 5, loss or grad", llmc_z),
    Rule("msprobe 0.5", msprobe),
    Rule("SPAM 50x mean (gradient)", spam_gradient),
    Rule("handbook: 7 sigma, 3 in a row", handbook),
)
