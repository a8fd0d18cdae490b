from __future__ import annotations

import math

from tests.rules.language.streams import record, rows_of, values_of


def test_absent_nan_and_zero_are_three_things() -> None:
    steps = [record(1), record(2, x=math.nan), record(3, x=0.0), record(4, x=-math.inf)]
    assert values_of("absent(x)", steps) == [True, False, False, False]
    assert values_of("isnan(x)", steps) == [None, True, False, False]
    assert values_of("isinf(x)", steps) == [None, False, False, True]
    assert values_of("x == 0", steps) == [None, False, True, False]


def test_not_due_is_not_absent_and_stale_is() -> None:
    steps = [record(1, x=1.0), *(record(step) for step in range(2, 24))]
    absent = values_of("absent(x)", steps)
    assert absent.index(True) == 21  # step 22: older than 20 steps
    assert rows_of("absent(x)", steps)[1] == (False, False)
    assert rows_of("absent(x)", steps)[21] == (True, True)


def test_absent_takes_any_expression() -> None:
    steps = [record(step, x=1.0) for step in range(1, 4)]
    assert values_of("absent(mean(x[10]))", steps) == [True, False, False]
    assert values_of("absent(y > 1)", steps) == [True, True, True]
