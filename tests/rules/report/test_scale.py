"""Axes and numbers."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from trainwarden.rules.report.scale import choose, labels, linear_ticks, short, whole


@given(st.lists(st.floats(-1e12, 1e12), min_size=1, max_size=50))
def test_every_value_lies_in_the_frame_and_ticks_do_too(values: list[float]) -> None:
    axis = choose(np.array(values))
    places = axis.place(np.array(values))
    assert ((places >= -1e-9) & (places <= 1 + 1e-9)).all()
    for tick in axis.ticks():
        assert axis.low - 1e-9 * abs(axis.low) <= tick <= axis.high + 1e-9 * abs(axis.high)


def test_a_large_range_is_logarithmic_and_a_small_one_is_not() -> None:
    assert choose(np.array([2.0, 3.0, 5000.0])).log
    assert not choose(np.array([2.0, 3.0, 11.0])).log
    assert not choose(np.array([-2.0, 3.0, 5000.0])).log


def test_the_first_decline_may_leave_the_frame_and_nothing_else_may() -> None:
    values = np.concatenate((np.linspace(11, 3.2, 50), np.full(950, 3.0), [6.0]))
    early = np.arange(len(values)) < 50
    axis = choose(values, early)
    assert 6.0 < axis.high < 7.0
    assert choose(values).high > 11


def test_zeros_on_a_logarithmic_axis_lie_on_its_lower_edge() -> None:
    axis = choose(np.array([0.0, 1e-3, 1.0, 100.0]))
    assert axis.log
    assert axis.place(np.array([0.0]))[0] == 0.0


@pytest.mark.parametrize(("low", "high"), [(0, 1), (2.04, 2.06), (1, 1_000_000), (-3, 8), (0, 640)])
def test_ticks_are_round_and_at_least_two(low: float, high: float) -> None:
    ticks = linear_ticks(low, high, 4)
    assert 2 <= len(ticks) <= 12
    step = ticks[1] - ticks[0]
    mantissa = step / 10 ** math.floor(math.log10(step) + 1e-9)
    assert round(mantissa, 6) in (1, 2, 5, 10)


def test_numbers_are_short() -> None:
    assert [short(value) for value in (0.0, 3.14159265, 31215.4, 2.5e-5, 1e6, math.nan, math.inf, -math.inf)] == [
        "0",
        "3.142",
        "31,215",
        "2.5e−5",
        "1e6",
        "NaN",
        "+Inf",
        "−Inf",
    ]
    assert whole(31215.0) == "31,215"


def test_ticks_that_differ_are_written_differently() -> None:
    assert labels([1_260_000.0, 1_260_200.0]) == ["1.26e6", "1.2602e6"]
    assert labels([2.0, 4.0]) == ["2", "4"]
    assert labels([100_000.5, 100_000.75]) != []
    assert len(set(labels([100_000.5, 100_000.75]))) == 2
