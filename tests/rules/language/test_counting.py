from __future__ import annotations

from tests.rules.language.streams import column, record, values_of


def test_count_counts_the_steps_at_which_it_held() -> None:
    given = [0.0, 2.0, 2.0, 0.0, 2.0, 2.0]
    assert values_of("count((x > 1)[3])", column(given)) == [0.0, 1.0, 2.0, 2.0, 2.0, 2.0]
    assert values_of("count((x > 1)[30])", column(given, first=10, stride=10)) == [0.0, 10.0, 20.0, 20.0, 20.0, 20.0]


def test_changes_counts_measured_values_that_differ_from_the_one_before() -> None:
    given = [1.0, 1.0, 2.0, None, 2.0, 1.0]
    assert values_of("changes(x[4])", column(given)) == [0.0, 0.0, 1.0, 1.0, 1.0, 1.0]
    assert values_of("changes((x > 1)[6])", column(given))[-1] == 2.0


def test_a_streak_grows_holds_and_breaks() -> None:
    given = [2.0, 2.0, None, 2.0, 0.0, 2.0]
    assert values_of("streak(x > 1)", column(given)) == [1.0, 2.0, 2.0, 4.0, 0.0, 1.0]
    assert values_of("streak(x > 1)", column([2.0, 2.0], first=10, stride=10)) == [10.0, 20.0]
    stale = [record(1, x=2.0), *(record(step) for step in range(2, 24)), record(24, x=2.0)]
    assert values_of("streak(x > 1)", stale)[-3:] == [None, None, 1.0]
