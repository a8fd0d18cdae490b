"""The notation of values means what promtool's users expect, in records."""

from __future__ import annotations

import math
import re

import pytest

from trainwarden.rules.ruletests.series import NotationError, values


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("1 2 -3.5", [1.0, 2.0, -3.5]),
        ("1+0.5x2", [1.0, 1.5, 2.0]),
        ("5-1x3", [5.0, 4.0, 3.0, 2.0]),
        ("-2+4x1", [-2.0, 2.0]),
        ("2x3", [2.0, 2.0, 2.0, 2.0]),
        ("1e-3x1", [1e-3, 1e-3]),
        ("_ 1 _x2", [None, 1.0, None, None]),
        ("1 _x0 2", [1.0, 2.0]),
        ("Inf -Inf +inf", [math.inf, -math.inf, math.inf]),
        ("  7\n 8 ", [7.0, 8.0]),
    ],
)
def test_a_text_stands_for_these_values(text: str, found: list[float | None]) -> None:
    assert values(text) == found


def test_nan_is_a_value_and_not_an_absence() -> None:
    (value,) = values("NaN")
    assert value is not None
    assert math.isnan(value)


@pytest.mark.parametrize(
    ("text", "stride", "absent"), [("1 stale", 1, 21), ("1 stale", 10, 3), ("1 _x29 1 stale", 1, 61)]
)
def test_stale_lasts_until_the_last_value_is_too_old(text: str, stride: int, absent: int) -> None:
    found = values(text, stride)
    assert found[-absent:] == [None] * absent
    assert found[-absent - 1] == 1.0


@pytest.mark.parametrize(
    ("text", "offset", "says"),
    [
        ("1 2 three", 4, "'three' is no value"),
        ("1+x5", 0, "'1+x5' is no value"),
        ("", 0, "no value"),
        ("1 2x99999999", 2, "more than 1000000"),
        ("1x600000 1x600000", 9, "more than 1000000"),
    ],
)
def test_another_word_is_named_with_its_place(text: str, offset: int, says: str) -> None:
    with pytest.raises(NotationError, match=re.escape(says)) as caught:
        values(text)
    assert caught.value.offset == offset
