from __future__ import annotations

import math

from trainwarden.rules.core.counted import counted


def test_one_is_not_many() -> None:
    assert [counted(number, "step") for number in (0, 1, 2)] == ["0 steps", "1 step", "2 steps"]


def test_a_count_that_a_run_measured_may_be_no_number() -> None:
    assert [counted(one, "step") for one in (1.2, 2.7, math.inf, math.nan)] == [
        "1 step",
        "3 steps",
        "inf steps",
        "nan steps",
    ]
