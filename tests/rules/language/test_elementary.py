from __future__ import annotations

import math

from tests.rules.language.streams import close, column, values_of


def test_abs_and_log2() -> None:
    given = [8.0, -2.0, 0.0, math.inf, math.nan]
    assert all(map(close, values_of("abs(x)", column(given)), [8.0, 2.0, 0.0, math.inf, math.nan]))
    assert all(map(close, values_of("log2(x)", column(given)), [3.0, math.nan, -math.inf, math.inf, math.nan]))
