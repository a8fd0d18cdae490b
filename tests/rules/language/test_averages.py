from __future__ import annotations

import math

import numpy as np

from tests.rules.language.streams import close, column, record, rows_of, values_of


def test_ema_includes_the_current_value_and_is_corrected_for_its_start() -> None:
    given = [4.0, 2.0, 3.0, 7.0]
    found = values_of("ema(x, beta=0.9)", column(given))
    for row in range(len(given)):
        weights = 0.9 ** np.arange(row, -1, -1)
        assert close(found[row], float(weights @ given[: row + 1] / weights.sum()))
    assert values_of("ema(x)", column(given)) == values_of("ema(x, beta=0.98)", column(given))


def test_ema_ignores_nan_and_what_is_absent() -> None:
    given = [4.0, math.nan, None, math.inf, 2.0]
    found = values_of("ema(x, beta=0.5)", column(given))
    assert found[:4] == [4.0] * 4
    assert close(found[4], values_of("ema(x, beta=0.5)", column([4.0, 2.0]))[1])
    assert [fresh for _, fresh in rows_of("ema(x)", column(given))] == [True, True, False, True, True]


def test_ema_decays_by_the_steps_that_a_record_covers() -> None:
    found = values_of("ema(x, beta=0.9)", [record(10, 10, x=1.0), record(20, 10, x=2.0)])
    keep = 0.9**10
    assert close(found[1], (keep * 1.0 + 2.0) / (keep + 1))


def test_ema_is_unknown_before_the_first_value_and_once_its_signal_is_stale() -> None:
    steps = [record(1), record(2, x=math.nan), record(3, x=1.0), *(record(step) for step in range(4, 30))]
    found = values_of("ema(x)", steps)
    assert found[:3] == [None, None, 1.0]
    assert found[22] == 1.0
    assert found[23] is None
