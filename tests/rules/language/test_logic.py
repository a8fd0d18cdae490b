from __future__ import annotations

import math

import pytest

from tests.rules.language.streams import record, values_of

# x is 1, y is NaN, lr was never seen.
ROW = record(1, x=1.0, y=math.nan)
UNKNOWN = "lr > 1"


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("x > 0 or x > 2 and x > 3", True),
        ("not x > 2", True),
        ("not x > 0 or x > 0", True),
        ("x > 0 unless x > 2", True),
        ("x > 0 unless x < 2", False),
        (UNKNOWN, None),
        (f"not {UNKNOWN}", None),
        (f"x > 0 and {UNKNOWN}", None),
        (f"x > 2 and {UNKNOWN}", False),
        (f"x > 0 or {UNKNOWN}", True),
        (f"x > 2 or {UNKNOWN}", None),
        (f"x > 0 unless {UNKNOWN}", None),
        (f"x > 2 unless {UNKNOWN}", False),
        ("y > 0", False),
        ("y <= 0", False),
        ("y == y", False),
        ("y != 0", False),
        ("y != y", False),
        ("not y > 0", False),
        ("not not y > 0", False),
        ("not y == 0", False),
        ("not (y > 0 or x > 2)", False),
        ("not (y > 0 and x > 0)", False),
        ("not (y > 0 and x > 2)", True),
        ("x > 0 unless y > 0", False),
        ("not isnan(y)", False),
        ("not isnan(x)", True),
        ("not absent(lr)", False),
        ("not (isnan(lr) or x > 2)", None),
        ("x >= 1 and x <= 1 and x == 1 and not x != 1", True),
    ],
)
def test_unknown_is_neither_and_a_comparison_with_nan_is_false_also_under_not(text: str, expected: bool | None) -> None:
    assert values_of(text, [ROW]) == [expected]
