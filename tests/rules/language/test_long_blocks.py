"""Many rows are reckoned at once where that is quicker: the numbers are those of one row after another."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest

from tests.rules.language.streams import pack_of, record, run, same
from trainwarden.record import Step

#: Each value of each expression is a change of its alert: it holds at every other known row at most.
EXPRESSIONS = (
    "mean(x[200])",
    "stddev(x[400] offset 40)",
    "slope(x[100])",
    "slope_t(x[200])",
    "median(x[50])",
    "median(x[700] offset 20)",
    "mad(x[50])",
    "mad(x[300])",
    "quantile(x[150], q=0.9)",
    "quantile(x[700] offset 20, q=0.99)",
    "min(x[30])",
    "max(x[400])",
    "changes(x[400])",
    "count((x > 1)[300])",
    "zscore(x[60])",
    "zscore(x)",
    "baseline(x, window=101, cut=4, patience=50)",
    "baseline(x, window=400)",
    "ema(x, beta=0.98)",
    "setback(x, records=5, spreads=0.1, share=0.01)",
    "setback(x, spreads=0, share=0)",
    "shift_t(x, records=100, share=0)",
    "shift_t(x, records=300)",
    "period(x > 1.5, window=500, min_events=3, tolerance=0.4, gap=5)",
)
PACK = pack_of(*(f"{text} > 1.01 * ema({text}, beta=0.5)" for text in EXPRESSIONS))


def stream(kind: str) -> list[Step]:
    rng = np.random.default_rng(5)
    level = np.exp(0.3 * rng.standard_normal(1600)) + (np.arange(1600) > 1000) * 0.8
    steps = []
    step = 0
    for place, value in enumerate(level.tolist()):
        step += 40 if kind == "odd" and place % 500 == 499 else 1
        signals: dict[str, Any] = {"x": value}
        if kind == "coarse":
            signals["x"] = round(value * 4) / 4 if place < 700 else 1.25
        elif kind == "slow" and place % 10:
            del signals["x"]
        elif kind == "odd" and place % 90 == 0:
            signals["x"] = float(rng.choice([math.nan, math.inf, 50.0, 0.0]))
        elif kind == "odd" and place % 70 == 0:
            del signals["x"]
        steps.append(record(step, 1, **signals))
    return steps


@pytest.mark.parametrize("kind", ["plain", "odd", "coarse", "slow"])
def test_a_long_block_gives_the_same_as_many_short_ones(kind: str) -> None:
    steps = stream(kind)
    whole = run(PACK, steps)
    assert len({change.rule for change in whole}) >= len(EXPRESSIONS) - 3
    assert same(run(PACK, steps, cuts=set(range(0, 1600, 5))), whole)
    assert same(run(PACK, steps, cuts=set(range(0, 1600, 617)), reload={617, 1234}), whole)
