"""Any chunking, and a dump and load at any record, gives the same alerts at the same steps."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from hypothesis import example, given, settings
from hypothesis import strategies as st

from tests.rules.language.streams import pack_of, record, run, same
from trainwarden.record import RankStats, Step
from trainwarden.rules.core.language import Pack
from trainwarden.rules.core.language.operators import FUNCTIONS

# At least one alert a function and operator, with short windows so that they slide, and thresholds that are often crossed.
EXPRESSIONS = (
    "x > 1",
    "x + y > 1.5 and not (y * 2 - x < 0.3)",
    "x / y >= 1 or -x % 0.7 == 0.1 unless y ^ 2 <= 0.2",
    "isnan(x) or isinf(x / y) or absent(y)",
    "not absent(x) and not isnan(y)",
    "abs(x - y) > 0.4 and log2(x) > -1",
    "x / ema(x, beta=0.8) > 1.1",
    "ema(y, beta=0.5) > ema(x / y, beta=0.9)",
    "x > mean(x[7])",
    "x > mean(x[7] offset 3) + 0.5 * stddev(x[9])",
    "y < median(y[11] offset 1)",
    "abs(y - median(y[12])) > mad(y[12])",
    "x > quantile(x[10], q=0.75) or x < quantile(x[10], 0.1)",
    "max(x[5]) - min(x[5] offset 2) > 0.6",
    "zscore(x[8]) > 1",
    "zscore(x, window=10, cut=2, patience=6) > 1.5",
    "x > 1.2 * baseline(x, window=8, cut=3, patience=5, patience_below=3)",
    "surprise(x, records=30, cut=3, patience=30) > 2",
    "x > 0.4 * tail(x, records=100) and surprise(y, records=30) > 0.5 * tail(surprise(y, records=30))",
    "setback(x, records=3, spreads=0.5, share=0.01) > 0.1",
    "shift_t(x, records=60, share=0) > 0.1",
    "slope(x[6]) > 0.05 and slope_t(x[9]) > 0.5",
    "delta(y[6]) > 0.3",
    "count((x > 1)[10]) >= 4",
    "changes(y[9]) > 5 and changes((x > 1)[9]) > 2",
    "streak(x > y) >= 3",
    "period(x > 1.4, window=60, min_events=3, tolerance=0.4, gap=2) > 0",
    "repeats(count((x > 1)[10]), window=30, least=3) > 0",
    "mean(median(x[5])[7]) > x",
    "grad_norm > 1.1 * median(grad_norm[9])",
    'grad_norm{group="mlp"} > grad_norm{group="embedding"}',
    "max_over(grad_norm by group) > 1.4 and argmax(grad_norm by group) > 1",
    "spread(loss by rank) > 0.5",
    "min_over(loss by rank) < 0.4 and argmax(loss by rank) == 1",
    "mad_over(loss by rank) < 0.2",
    "nonfinite_over(loss by rank) > 0",
    "max_over(loss by rank) - median_over(loss by rank) > 0.3",
    "twins(loss by rank) > 0",
    "disagree(loss by rank) > 0",
    "alone(loss by rank) > 0.5",
    "uneven(loss by rank) > 1.2 and ahead(loss by rank, beta=0.9) > 1.1",
    "nonfinite > 0",
    "update_ratio > 1 and update_ratio > mean(update_ratio[40])",
)
HOLDS = (("1 steps", "0 steps"), ("3 steps", "4 steps"), ("2 records", "1 records"), ("3s", "2s"))
PACKS = [pack_of(*EXPRESSIONS, hold=hold, keep=keep) for hold, keep in HOLDS]


def stream(seed: int, length: int, odd: float) -> list[Step]:
    """Return a stream with noise, equal values, NaN, infinities, absent columns, gaps, strides and skipped steps."""
    rng = np.random.default_rng(seed)
    stride = int(rng.choice([1, 1, 1, 5]))
    slow = int(rng.choice([3, 10, 30]))
    step = 0
    level = 1.0
    steps = []

    def number(scale: float = 1.0) -> float:
        if rng.random() < odd / 4:
            return float(rng.choice([math.nan, math.inf, -math.inf, 0.0, -0.0, 1e300]))
        if rng.random() < 0.3:
            return float(rng.choice([0.1, 0.5, 1.0, 1.5]))
        return float(scale * math.exp(rng.normal() * 0.4))

    for place in range(length):
        step += stride * (1 if rng.random() > odd / 5 else int(rng.choice([2, 15, 40])))
        if rng.random() < 0.02:
            level *= float(rng.choice([0.3, 3.0]))
        signals: dict[str, Any] = {
            "x": number(level),
            "y": number(),
            "by_rank": {"0": number(), "1": number(), "2": number()},
        }
        signals["grad_norm"] = {"all": number(), "mlp": number(), "embedding": number()}
        signals["nonfinite"] = {"loss": float(rng.random() < 0.05), "grad": float(rng.random() < 0.05)}
        if rng.random() < odd:
            signals["skipped"] = float(rng.random() < 0.5) * stride
        if place % slow == 0:
            signals["update_ratio"] = {"all": number()}
        for name in list(signals):
            if rng.random() < odd:
                del signals[name]
            elif isinstance(signals[name], dict) and rng.random() < odd:
                signals[name].pop(next(iter(signals[name])))
        if 0.3 < place / length < 0.5 and odd > 0.1:
            signals.pop("y", None)
        steps.append(record(step, stride, **signals))
        if rng.random() < odd:
            low, high = sorted((number(), number()))
            name = str(rng.choice(["loss", "rank_loss"]))
            steps[-1].ranks[name] = RankStats(min=low, max=high, sum=0.0, argmax=int(rng.integers(8)), n=8)
    return steps


def test_every_function_takes_part() -> None:
    text = " ".join(EXPRESSIONS)
    # The clock is told at ticks, and a parent is given in test_resumes.
    of_records = [name for name, function in FUNCTIONS.items() if function.takes and not function.of_parent]
    assert [name for name in of_records if f"{name}(" not in text] == []


@settings(max_examples=40)
@given(
    pack=st.sampled_from(PACKS),
    seed=st.integers(0, 10_000),
    length=st.integers(1, 160),
    odd=st.sampled_from([0.0, 0.05, 0.3]),
    cuts=st.sets(st.integers(0, 160)),
    reload=st.sets(st.integers(0, 160), max_size=6),
)
@example(pack=PACKS[0], seed=0, length=160, odd=0.3, cuts=set(range(160)), reload=set())
@example(pack=PACKS[1], seed=1, length=160, odd=0.3, cuts=set(), reload=set(range(160)))
def test_any_cut_and_any_restart_gives_the_same_alerts(
    pack: Pack, seed: int, length: int, odd: float, cuts: set[int], reload: set[int]
) -> None:
    steps = stream(seed, length, odd)
    whole = run(pack, steps)
    assert same(run(pack, steps, cuts=cuts), whole)
    assert same(run(pack, steps, cuts=cuts, reload=reload), whole)


def test_the_streams_make_every_alert_change() -> None:
    steps = [stream(seed, 160, odd) for seed in range(12) for odd in (0.0, 0.05, 0.3)]
    seen = {change.rule for each in steps for change in run(PACKS[0], each) if change.state == "firing"}
    assert {f"r{place}" for place in range(len(EXPRESSIONS))} == seen


@given(seed=st.integers(0, 10_000), length=st.integers(1, 120), odd=st.sampled_from([0.0, 0.3]))
@settings(max_examples=20)
def test_the_state_does_not_grow(seed: int, length: int, odd: float) -> None:
    import msgspec

    from tests.rules.language.streams import block
    from trainwarden.rules.core.language import Evaluator

    steps = stream(seed, length, odd)
    evaluator = Evaluator(PACKS[0])
    evaluator.feed(block(steps))
    assert len(msgspec.json.encode(evaluator.dump())) < 60_000
