from __future__ import annotations

import math

import numpy as np

from tests.rules.language.streams import close, column, values_of

RNG = np.random.default_rng(0)
QUIET = (2 + 0.01 * RNG.normal(size=400)).tolist()


def test_the_baseline_is_the_median_of_the_values_before_the_current_one() -> None:
    given = [1.0, 3.0, 2.0, 5.0]
    assert values_of("baseline(x, window=5)", column(given)) == [None, 1.0, 1.0, 1.0]
    assert values_of("baseline(x, window=5, cut=1000)", column(given)) == [None, 1.0, 2.0, 2.0]


def test_the_baseline_keeps_outliers_out() -> None:
    given = [*QUIET[:200], *[50.0] * 60, *QUIET[200:]]
    with_, without = values_of("baseline(x)", column(given)), values_of("baseline(x)", column(QUIET))
    assert with_[199:260] == [with_[200]] * 60 + [with_[259]] or with_[200:260] == [with_[200]] * 60
    assert with_[260:] == without[200:]


def test_a_true_level_shift_is_let_in_after_a_while() -> None:
    values = values_of("baseline(x, patience=150)", column([*QUIET[:200], *(value + 1 for value in QUIET[:200])]))
    assert max(values[200:350]) < 2.1
    assert min(values[350:]) > 2.9


def test_a_shift_down_may_be_let_in_sooner() -> None:
    given = [*QUIET[:200], *(value - 1 for value in QUIET[:100])]
    values = values_of("baseline(x, patience=150, patience_below=30)", column(given))
    assert min(values[200:230]) > 1.9
    assert max(value for value in values[230:] if value is not None) < 1.1


def test_a_shift_must_stay_on_one_side() -> None:
    given = [*QUIET[:200], *(3.0 if place % 10 else 1.0 for place in range(200))]
    assert max(values_of("baseline(x, patience=20)", column(given))[200:]) < 2.1


def test_a_steady_trend_is_followed() -> None:
    given = [5 - 0.01 * step for step in range(300)]
    values = values_of("baseline(x)", column(given))
    assert all(abs(value - given[row]) < 0.6 for row, value in enumerate(values) if value is not None)


def test_nan_and_what_is_not_due_change_nothing() -> None:
    given = [*QUIET[:100], math.nan, None, math.inf, *QUIET[100:120]]
    assert close(values_of("baseline(x)", column(given))[-1], values_of("baseline(x)", column(QUIET[:120]))[-1])


def test_zscore_is_the_distance_in_robust_spreads() -> None:
    given = [*QUIET[:200], 2.1]
    past = np.array(QUIET[100:200])
    spread = 1.4826 * np.median(np.abs(past - np.median(past)))
    assert close(values_of("zscore(x)", column(given))[-1], float((2.1 - np.median(past)) / spread))


def test_one_quantum_of_a_rounded_loss_is_no_outlier() -> None:
    values = values_of("zscore(x)", column([1.6875] * 60 + [1.6953]))
    assert values[-1] is not None
    assert values[-1] < 4


def test_a_spread_of_nothing_gives_no_z() -> None:
    assert math.isnan(values_of("zscore(x)", column([0.0] * 60 + [1.0]))[-1])
    assert math.isnan(values_of("zscore(x[20])", column([0.0] * 60 + [1.0]))[-1])


def test_zscore_of_a_window_compares_the_newest_with_the_others() -> None:
    given = [1.0, 2.0, 3.0, 6.0]
    assert close(values_of("zscore(x[4])", column(given))[-1], 4.0)
