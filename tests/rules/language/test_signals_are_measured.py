"""Measured, not due, stale, never seen: the states of a signal."""

from __future__ import annotations

import math

import pytest

from tests.rules.language.streams import column, record, rows_of, values_of
from trainwarden.record import Step


def slow(every: int, until: int, last: int) -> list[Step]:
    """Return steps 1 to ``until`` with x measured at every ``every``-th up to ``last``."""
    return [record(s, x=float(s) if s % every == 0 and s <= last else None, y=1.0) for s in range(1, until + 1)]


def test_a_value_that_is_not_due_is_the_last_one_without_weight() -> None:
    rows = rows_of("x", column([None, 1.0, None, math.nan, None]))
    assert rows[:3] == [(None, False), (1.0, True), (1.0, False)]
    assert [(math.isnan(value or 0.0), fresh) for value, fresh in rows[3:]] == [(True, True), (True, False)]


@pytest.mark.parametrize(("every", "limit"), [(1, 20), (5, 20), (10, 20), (11, 22), (50, 100)])
def test_a_value_is_stale_after_twenty_steps_or_twice_its_cadence(every: int, limit: int) -> None:
    values = values_of("x", slow(every, 10 * every + limit + 5, 10 * every))
    last = 10 * every
    assert values[last + limit - 1] == last
    assert values[last + limit] is None


def test_one_long_outage_is_not_a_cadence() -> None:
    given = [1.0] * 30 + [None] * 100 + [1.0] * 5 + [None] * 40
    values = values_of("x", column(given))
    assert values[134 + 20] == 1.0
    assert values[134 + 21] is None


def test_a_burst_of_measurements_does_not_make_a_slow_signal_stale() -> None:
    given = [1.0 if place % 50 == 0 or 200 <= place < 250 else None for place in range(420)]
    assert None not in values_of("x", column(given))[100:]


def test_a_column_that_is_missing_in_a_record_is_absent_there() -> None:
    assert values_of("x", [record(1), record(2, x=2.0), record(3, y=1.0)]) == [None, 2.0, 2.0]


def test_a_gradient_is_not_due_at_a_step_that_was_skipped() -> None:
    steps = [record(1, grad_norm={"all": 1.0}, loss=1.0), record(2, grad_norm={"all": 9.0}, loss=2.0, skipped=1.0)]
    assert rows_of("grad_norm", steps)[1] == (1.0, False)
    assert rows_of("loss", steps)[1] == (2.0, True)
    averaged = [record(10, 10, grad_norm={"all": 1.0}), record(20, 10, grad_norm={"all": 9.0}, skipped=1.0)]
    assert rows_of("grad_norm", averaged)[1] == (9.0, True)


def test_a_bare_number_of_a_grouped_signal_is_the_whole_model() -> None:
    steps = [record(1, grad_norm=2.0), record(2, grad_norm={"all": 3.0, "mlp": 1.0})]
    assert values_of("grad_norm", steps) == [2.0, 3.0]
    assert values_of('grad_norm{group="all"}', steps) == [2.0, 3.0]
    assert values_of('grad_norm{group="mlp"}', steps) == [None, 1.0]


def test_a_counter_without_a_total_is_the_sum_of_its_parts() -> None:
    steps = [record(1, nonfinite={"loss": 1.0, "grad": 2.0}), record(2, nonfinite=5.0), record(3)]
    assert values_of("nonfinite", steps) == [3.0, 5.0, 5.0]
    assert values_of('nonfinite{quantity="grad"}', steps) == [2.0, 2.0, 2.0]


def test_labels_of_two_levels_and_of_parameter_groups() -> None:
    steps = [record(1, moment_rms={"exp_avg": {"all": 1.0, "mlp": 2.0}}, lr={"all": 3.0, "7": 4.0})]
    assert values_of('moment_rms{moment="exp_avg"}', steps) == [1.0]
    assert values_of('moment_rms{group="mlp", moment="exp_avg"}', steps) == [2.0]
    assert values_of('lr{group="7"}', steps) == [4.0]
