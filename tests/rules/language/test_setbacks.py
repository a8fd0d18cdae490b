from __future__ import annotations

import math

import numpy as np

from tests.rules.language.streams import column, values_of


def falling(length: int, seed: int = 0) -> list[float]:
    rng = np.random.default_rng(seed)
    return [2 + 2 * math.exp(-place / 30) + 0.05 * float(rng.normal()) for place in range(length)]


def test_a_run_that_falls_or_stands_has_no_setback() -> None:
    values = values_of("setback(x)", column(falling(3000)))
    assert values[:19] == [None] * 19
    assert max(values[30:]) < 0.02


def test_it_is_the_share_of_the_run_that_is_worse_than_before() -> None:
    given = falling(60)
    values = values_of("setback(x)", column([*given, *(value + 0.5 for value in falling(100)[60:])]))
    assert max(values[30:60]) == 0
    assert values[-1] == (100 - 63) / 100


def test_what_comes_back_ends_it() -> None:
    given = falling(200)
    bump = [value + (0.6 if 100 <= place < 130 else 0) for place, value in enumerate(given)]
    values = values_of("setback(x)", column(bump))
    assert max(values[30:]) > 0.15
    assert values[-1] == 0


def test_the_same_stretch_is_nothing_in_a_long_run() -> None:
    given = falling(2000)
    bump = [value + (0.6 if 1500 <= place < 1530 else 0) for place, value in enumerate(given)]
    assert max(value for value in values_of("setback(x)", column(bump)) if value is not None) < 0.03


def test_the_stride_is_counted_in_steps() -> None:
    given = [*falling(60), *(value + 0.5 for value in falling(100)[60:])]
    one, five = (values_of("setback(x)", column(given, first=stride, stride=stride)) for stride in (1, 5))
    assert one == five


def test_values_that_are_not_finite_change_nothing() -> None:
    given = falling(100)
    odd = [*given[:60], math.nan, math.inf, *given[60:]]
    assert set(values_of("setback(x)", column(odd))[30:]) == {0.0}
