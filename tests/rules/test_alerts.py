"""The life of an alert, record by record."""

from __future__ import annotations

import math

import pytest

from tests.rules.language.streams import column, pack_of, record, run, said
from trainwarden.rules.core.alerts import Alert, AlertRule, Hold, Record, State

HIGH, LOW = 2.0, 0.0


def life(
    values: list[float | None], hold: str = "1 steps", keep: str = "0 steps", stride: int = 1
) -> list[tuple[str, int, int]]:
    """Return state, step and since of each change of ``x > 1``."""
    steps = column(values, first=stride, stride=stride)
    return [(state, step, since) for _, state, step, since in said(run(pack_of("x > 1", hold=hold, keep=keep), steps))]


def test_without_a_for_the_first_true_step_fires() -> None:
    assert life([LOW, HIGH, HIGH, LOW], hold="0 steps") == [("firing", 2, 2), ("resolved", 4, 2)]


def test_for_n_steps_is_met_on_the_nth_true_step_the_first_included() -> None:
    assert life([LOW, HIGH, HIGH, HIGH, HIGH, LOW], hold="3 steps") == [
        ("pending", 2, 2),
        ("firing", 4, 2),
        ("resolved", 6, 2),
    ]


def test_a_pending_alert_that_is_false_once_starts_anew() -> None:
    assert life([HIGH, HIGH, LOW, HIGH, HIGH, HIGH], hold="3 steps") == [
        ("pending", 1, 1),
        ("resolved", 3, 1),
        ("pending", 4, 4),
        ("firing", 6, 4),
    ]


@pytest.mark.parametrize(
    ("hold", "stride", "fires"),
    [
        ("3 steps", 10, 30),  # three records, though one covers ten steps
        ("2 steps", 10, 20),
        ("1 steps", 10, 10),
        ("20 steps", 10, 30),
        ("50 steps", 10, 50),
        ("50 steps", 100, 300),
        ("20 steps", 1, 20),
        ("2 records", 10, 20),
        ("3 records", 1, 3),
    ],
)
def test_with_a_stride_the_records_cover_the_steps_and_number_at_least_three(
    hold: str, stride: int, fires: int
) -> None:
    changes = life([HIGH] * 60, hold=hold, stride=stride)
    assert changes[-1] == ("firing", fires, stride)


def test_a_time_is_counted_on_the_records_clock() -> None:
    assert life([HIGH] * 10, hold="5s") == [("pending", 1, 1), ("firing", 6, 1)]


def test_a_record_at_which_nothing_was_measured_holds_for() -> None:
    assert life([HIGH, None, HIGH, HIGH], hold="3 steps") == [("pending", 1, 1), ("firing", 4, 1)]
    assert life([HIGH, None, None, None, HIGH, HIGH, LOW], hold="6 steps")[1:] == [("firing", 6, 1), ("resolved", 7, 1)]
    assert life([LOW, None, None, HIGH, None, LOW], hold="1 steps") == [("firing", 4, 4), ("resolved", 6, 4)]


def test_a_signal_measured_every_tenth_step_counts_the_steps_in_between() -> None:
    values = [HIGH if place % 10 == 9 else None for place in range(60)]
    assert life(values, hold="20 steps") == [("pending", 10, 10), ("firing", 30, 10)]


def test_unknown_ends_a_pending_alert_and_a_firing_one_without_keep() -> None:
    values = [HIGH] * 3 + [None] * 21
    assert life(values, hold="9 steps") == [("pending", 1, 1), ("unknown", 24, 1)]
    assert life(values, hold="2 steps")[1:] == [("firing", 2, 1), ("unknown", 24, 1)]


def test_a_firing_alert_that_turns_unknown_keeps_firing_and_then_ends_as_unknown() -> None:
    values = [HIGH] * 3 + [None] * 40
    assert life(values, keep="30 steps") == [("firing", 1, 1), ("unknown", 34, 1)]


def test_keep_firing_for_outlasts_short_quiet() -> None:
    values = [HIGH, LOW, LOW, HIGH, LOW, LOW, LOW, LOW, LOW]
    assert life(values, keep="3 steps") == [("firing", 1, 1), ("resolved", 8, 1)]
    assert life(values, keep="3 records") == [("firing", 1, 1), ("resolved", 8, 1)]
    assert life(values, keep="3s") == [("firing", 1, 1), ("resolved", 8, 1)]
    assert life([HIGH, math.nan, math.nan], keep="1 steps") == [("firing", 1, 1), ("resolved", 3, 1)]


def test_few_missing_records_hold_and_many_break_what_is_pending() -> None:
    few = [*column([HIGH] * 2), *column([HIGH] * 4, first=20)]
    many = [*column([HIGH] * 2), *column([HIGH] * 4, first=50)]
    pack = pack_of("x > 1", hold="4 steps")
    assert said(run(pack, few)) == [("r0", "pending", 1, 1), ("r0", "firing", 21, 1)]
    assert said(run(pack, many)) == [("r0", "pending", 1, 1), ("r0", "firing", 53, 50)]


def test_changes_come_by_row_and_then_by_rule() -> None:
    pack = pack_of("x > 1", "y > 1")
    steps = [record(1, x=LOW, y=HIGH), record(2, x=HIGH, y=LOW), record(3, x=LOW, y=LOW)]
    changes = run(pack, steps)
    assert [(change.row, change.rule, change.state) for change in changes] == [
        (0, "r1", "firing"),
        (1, "r0", "firing"),
        (1, "r1", "resolved"),
        (2, "r0", "resolved"),
    ]


@pytest.mark.parametrize(
    ("expression", "value"),
    [
        ("x / y > 1.5", 2.0),
        ("1.5 < x / y", 2.0),
        ("isnan(lr) or x > 3", 4.0),
        ("absent(lr)", None),
        ("not x <= 3", 4.0),
    ],
)
def test_the_value_is_what_was_compared(expression: str, value: float | None) -> None:
    (change,) = run(pack_of(expression), [record(1, x=4.0, y=2.0, lr=None)])
    assert change.value == value if expression != "isnan(lr) or x > 3" else change.value is None


def test_durations_are_read_in_three_units() -> None:
    assert [Hold.parse(text) for text in ("3 steps", "1 step", "20records", "90s", "1h30m", "1d")] == [
        Hold(3),
        Hold(1),
        Hold(20, "records"),
        Hold(90, "seconds"),
        Hold(5400, "seconds"),
        Hold(86400, "seconds"),
    ]
    for text in ("", "3", "three steps", "5 m", "-3 steps", "3 epochs", "5m10"):
        with pytest.raises(ValueError, match="no duration; write 3 steps"):
            Hold.parse(text)


def test_the_machine_names_its_four_states() -> None:
    alert = Alert(AlertRule("a", Hold(2), Hold(), {}, {}))
    seen = [alert.state]
    for step, true in enumerate([True, True, False], start=1):
        alert.feed(Record(0, step, 1, 0.0, true, True, True, None))
        seen.append(alert.state)
    assert seen == [State.INACTIVE, State.PENDING, State.FIRING, State.RESOLVED]


def test_a_log_without_times_never_meets_a_time_and_keeps_nothing() -> None:
    alert = Alert(AlertRule("a", Hold(1, "seconds"), Hold(), {}, {}))
    for step in range(1, 10):
        alert.feed(Record(0, step, 1, math.nan, True, True, True, None))
    assert alert.state is State.PENDING
    restored = Alert(AlertRule("a", Hold(1, "seconds"), Hold(), {}, {}))
    restored.load(alert.dump())
    assert restored.dump() == alert.dump()
