from __future__ import annotations

import math

import pytest

from tests.rules.language.streams import close, record, values_of


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("x + y * 2", 5.0),
        ("(x + y) * 2", 8.0),
        ("x - y - 2", 0.0),
        ("12 / x / 2", 2.0),
        ("-x ^ 2", -9.0),
        ("x ^ -1", 1 / 3),
        ("2 ^ x ^ 2 + 0 * y", 512.0),
        ("7 % x", 1.0),
        ("-7 % x", -1.0),
        ("x / 0", math.inf),
        ("0 / 0 * x", math.nan),
        ("x % 0", math.nan),
        ("(-x) ^ 0.5", math.nan),
        ("(x - x) ^ -1", math.inf),
        ("(1000 * x) ^ 1000", math.inf),
        ("(-1000 * x) ^ 1001", -math.inf),
        ("x - -y", 4.0),
        ("x * 1e-3 + .5", 0.503),
    ],
)
def test_arithmetic_binds_and_counts_as_in_promql(text: str, expected: float) -> None:
    assert close(values_of(text, [record(1, x=3.0, y=1.0)])[0], expected)


def test_a_result_is_known_where_both_sides_are() -> None:
    steps = [record(1, x=1.0), record(2, y=2.0), record(3, x=3.0, y=1.0)]
    assert values_of("x + y", steps) == [None, 3.0, 4.0]
    assert values_of("1 ^ x", [record(1, y=1.0)]) == [None]
