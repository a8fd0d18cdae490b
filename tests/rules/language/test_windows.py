"""``expr[N] offset M``: the N steps that end M steps ago."""

from __future__ import annotations

import math

import pytest

from tests.rules.language.streams import column, record, values_of

UP = column(float(value) for value in range(1, 31))


def test_a_window_holds_the_last_steps_with_the_current_one() -> None:
    assert values_of("min(x[5])", UP)[9] == 6.0
    assert values_of("max(x[5])", UP)[9] == 10.0


def test_an_offset_moves_the_window_back() -> None:
    assert values_of("min(x[5] offset 3)", UP)[9] == 3.0
    assert values_of("max(x[5] offset 3)", UP)[9] == 7.0


@pytest.mark.parametrize(("steps", "first"), [(1, 0), (5, 0), (6, 1), (10, 1), (35, 6), (100, 19)])
def test_a_window_counts_from_a_fifth_full(steps: int, first: int) -> None:
    values = values_of(f"mean(x[{steps}])", UP)
    assert values[:first] == [None] * first
    assert values[first] is not None


def test_an_offset_delays_the_first_value() -> None:
    values = values_of("mean(x[10] offset 4)", UP)
    assert values[:5] == [None] * 5
    assert values[5] == 1.5


def test_a_record_with_a_stride_covers_its_steps() -> None:
    steps = column([1.0, 2.0, 3.0, 4.0], first=10, stride=10)
    assert values_of("mean(x[100])", steps) == [None, 1.5, 2.0, 2.5]
    assert values_of("mean(x[20])", steps) == [1.0, 1.5, 2.5, 3.5]


def test_a_gap_is_not_filled() -> None:
    steps = [*column([1.0] * 10), *column([2.0] * 3, first=111)]
    assert values_of("mean(x[20])", steps)[-3:] == [None, None, None]
    assert values_of("mean(x[15])", steps)[-3:] == [None, None, 2.0]


def test_nan_and_infinities_and_what_is_not_due_get_no_weight() -> None:
    given = [1.0, math.nan, None, math.inf, 3.0]
    assert values_of("mean(x[10])", column(given)) == [None, None, None, None, 2.0]
    assert values_of("mean(x[5])", column(given)) == [1.0, 1.0, 1.0, 1.0, 2.0]


def test_a_slow_signal_fills_a_window_by_the_steps_it_stands_for() -> None:
    steps = [record(step, x=float(step) if step % 10 == 0 else None) for step in range(1, 101)]
    values = values_of("mean(x[100])", steps)
    assert values[27] is None
    assert values[28] == 15.0  # known at steps 10 to 29: 20 steps, with two values measured
    assert values[99] == 55.0


def test_a_window_outlives_a_signal_that_went_stale() -> None:
    steps = [*column([2.0] * 20), *(record(step) for step in range(21, 60))]
    values = values_of("median(x[40])", steps)
    assert values[50] == 2.0
    assert values[-1] is not None
    assert values_of("median(x[40] offset 20)", steps)[45] == 2.0


def test_windows_of_expressions_and_of_windows() -> None:
    assert values_of("mean((x * 2)[3])", UP)[9] == 18.0
    assert values_of("max(mean(x[3])[2])", UP)[9] == 9.0
    assert values_of("median(x[3]) - 1", UP)[9] == 8.0
