from __future__ import annotations

import math

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.rules.language.streams import column, values_of


@settings(max_examples=30)
@given(st.integers(0, 1000), st.integers(4, 30), st.sampled_from([1, 10]))
def test_slope_and_its_t_are_those_of_least_squares(seed: int, length: int, stride: int) -> None:
    rng = np.random.default_rng(seed)
    given_ = rng.normal(size=length) + 0.1 * np.arange(length)
    steps = column(given_.tolist(), first=stride, stride=stride)
    x = np.array([step.step for step in steps], dtype=float)
    (slope, at_zero), cov = np.polyfit(x, given_, 1), None
    rest = given_ - slope * x - at_zero
    error = math.sqrt(rest @ rest / (length - 2) / ((x - x.mean()) ** 2).sum())
    assert cov is None
    assert math.isclose(values_of(f"slope(x[{length * stride}])", steps)[-1], slope, rel_tol=1e-9, abs_tol=1e-12)
    assert math.isclose(values_of(f"slope_t(x[{length * stride}])", steps)[-1], slope / error, rel_tol=1e-6)


def test_a_perfect_line_has_an_infinite_t_and_a_constant_has_none() -> None:
    assert values_of("slope_t(x[10])", column([1.0, 2.0, 3.0, 4.0]))[-1] == math.inf
    assert values_of("slope_t(x[10])", column([4.0, 3.0, 2.0, 1.0]))[-1] == -math.inf
    assert values_of("slope_t(x[10])", column([0.1] * 9))[-1] == 0.0
    assert values_of("slope(x[10])", column([0.1] * 9))[-1] == 0.0


def test_delta_is_last_minus_first() -> None:
    assert values_of("delta(x[4])", column([5.0, 1.0, 2.0, 4.0, 8.0, None])) == [None, -4.0, -3.0, -1.0, 7.0, 6.0]
