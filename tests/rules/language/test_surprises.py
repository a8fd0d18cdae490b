from __future__ import annotations

import math

import numpy as np

from tests.rules.language.streams import column, values_of

RNG = np.random.default_rng(0)
FALLING = [5 - 0.01 * place + 0.05 * float(RNG.normal()) for place in range(300)]


def test_a_surprise_is_measured_in_the_noise_around_the_line() -> None:
    values = values_of("surprise(x)", column([*FALLING, FALLING[-1] - 0.01 + 1.0]))
    assert values[:30] == [None] * 30
    assert max(abs(value) for value in values[100:-1]) < 6
    assert 12 < values[-1] < 28


def test_a_falling_line_is_no_surprise_and_standing_still_is() -> None:
    steep = [5 - 0.05 * place + 0.01 * float(RNG.normal()) for place in range(80)]
    values = values_of("surprise(x)", column([*steep, *[steep[-1]] * 10]))
    assert abs(np.median(values[40:80])) < 1.5
    assert values[-1] > 10


def test_what_lasts_longer_than_the_patience_is_the_new_normal() -> None:
    rng = np.random.default_rng(3)
    values = values_of("surprise(x, patience=30)", column([*FALLING[:200], *(9 + 0.05 * rng.normal(size=100))]))
    assert min(values[200:230]) > 50
    assert abs(np.median(values[235:])) < 2


def test_a_rounded_loss_moves_by_one_step_without_a_surprise() -> None:
    coarse = [1.6875 + 0.0078 * round(float(RNG.normal())) for _ in range(100)]
    values = values_of("surprise(x)", column([*coarse, 1.6875 + 0.0078, 1.6875 + 10 * 0.0078]))
    assert abs(values[-2]) < 3
    assert values[-1] > 6


def test_a_series_of_two_values_has_no_spread() -> None:
    assert values_of("surprise(x)", column([1.0, 2.0] * 40))[20:] == [None] * 60


def test_what_is_not_finite_or_no_square_teaches_nothing() -> None:
    odd = [math.nan, math.inf, -math.inf, 1e300]
    given = [*FALLING[:100], *odd, *FALLING[100:]]
    with_, without = (values_of("surprise(x)", column(series)) for series in (given, FALLING))
    assert with_[101] == math.inf
    assert max(with_[104:]) < 6
    assert max(without[100:]) < 6


def test_the_tail_of_normal_noise_is_a_little_above_four_spreads() -> None:
    noise = np.random.default_rng(1).normal(size=6000).tolist()
    assert 3.3 < values_of("tail(x)", column(noise))[-1] < 5.2


def test_a_heavy_tail_stretches_it() -> None:
    rng = np.random.default_rng(1)
    noise = [
        float(value) for value in rng.normal(size=6000) + 2 * (rng.random(6000) < 0.1) * rng.exponential(size=6000)
    ]
    assert values_of("tail(x)", column(noise))[-1] > 6


def test_the_tail_does_not_learn_from_an_event() -> None:
    noise = np.random.default_rng(2).normal(size=1000).tolist()
    with_ = values_of("tail(x)", column([*noise, *[20.0] * 50, *noise[:20]]))
    assert with_[1020] == with_[1001]


def test_before_anything_was_seen_the_tail_is_made_up() -> None:
    first = values_of("tail(x)", column([0.0]))[0]
    assert 5 < first < 6
