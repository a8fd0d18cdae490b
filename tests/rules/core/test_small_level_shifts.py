"""A shift of the level that single records hardly show: it is called one, it began where the level left, and no batch is blamed."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from tests.cases.build import Row, judge, rows


def decaying(height: float, at: int = 2200, end: int = 10**9) -> Any:
    """Return the losses of a small run (noise 0.03), higher by ``height`` at the steps from ``at`` to ``end``."""

    def make(step: int, chance: np.random.Generator) -> Row:
        loss = 2.2 + 8 * float(np.exp(-step / 250)) + 0.03 * float(chance.normal())
        norm = 0.8 + 2 * float(np.exp(-step / 100)) + 0.08 * abs(float(chance.normal()))
        return {"loss": loss + height * (at <= step < end), "grad_norm": norm}

    return make


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("height", [0.08, 0.1])
def test_a_level_higher_by_three_deviations_is_a_level_shift_from_its_first_step(height: float, seed: int) -> None:
    found = judge(rows(1, 3000, decaying(height), seed=seed))
    (page,) = found.pages
    assert page["verdict"] == "level_shift"
    assert abs(page["onset_step"] - 2200) <= max(4, page["onset_uncertainty"])
    assert page["onset_uncertainty"] <= 10
    assert page["opened_step"] > 2250  # the rule that sees it compares windows
    said = " ".join(one["says"] for one in page["evidence"])
    assert "hard batch" not in said
    assert "samples of step" not in str(page["cheapest_test"])


def test_a_level_that_comes_back_is_not_called_one_when_it_has() -> None:
    found = judge(rows(1, 4000, decaying(0.1, end=2600), seed=1))
    (page,) = found.pages
    assert page["state"] == "recovered"
    assert page["verdict"] != "level_shift"
    assert abs(page["onset_step"] - 2200) <= 4


def test_a_spike_before_a_small_shift_does_not_place_it() -> None:
    shifts = decaying(0.1)

    def make(step: int, chance: np.random.Generator) -> Row:
        row = shifts(step, chance)
        return row | {"loss": row["loss"] + 0.05 * (2100 <= step < 2103)}

    (page,) = judge(rows(1, 3000, make, seed=2)).pages
    assert abs(page["onset_step"] - 2200) <= 4
