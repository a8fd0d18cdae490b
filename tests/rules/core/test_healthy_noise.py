"""Healthy runs that are not calm: no page, and nothing is done to them in mode act."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest

from tests.rules.core.runs import Attempt, Change, acting, default_pack


def flattening(step: int) -> float:
    """A curve that bends away from any straight line over log step: it flattens while the trend still falls."""
    return 2.0 + 8.0 * math.exp(-step / 200) + 1.0 / math.sqrt(1 + step / 50)


def hard_batches(seed: int, share: float = 0.02) -> Change:
    def change(step: int, signals: dict[str, Any]) -> None:
        chance = np.random.default_rng((seed, step))
        signals["loss"] = flattening(step) * math.exp(0.02 * chance.standard_normal()) + 0.8 * (chance.random() < share)

    return change


def heavy_tails(seed: int) -> Change:
    def change(step: int, signals: dict[str, Any]) -> None:
        chance = np.random.default_rng((seed, step))
        signals["loss"] = flattening(step) + 0.03 * float(np.clip(chance.standard_t(2), -30, 30))
        signals["grad_norm"] = {"all": math.exp(0.3 * float(np.clip(chance.standard_t(2), -8, 8)))}

    return change


NOISE = {
    **{f"hard batches, seed {seed}": hard_batches(seed) for seed in range(2)},
    "heavy tails": heavy_tails(1),
}


@pytest.mark.parametrize("noise", NOISE)
def test_a_healthy_noisy_run_pages_nobody_and_is_left_alone(noise: str) -> None:
    played = acting(default_pack())
    played.play(Attempt(last=2000, changes=(NOISE[noise],)))
    assert [row["summary"] for row in played.incidents if row["severity"] == "critical"] == []
    assert [row["summary"] for row in played.incidents if row["action"] != "none"] == []
