"""Each rule of the default pack about what surrounds the loss: it sees its own event, and nothing where there is none."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest

from tests.rules.test_default_pack import fired, stream


def healthy(place: int, signals: dict[str, Any]) -> None:
    """Add an optimizer that warms up, decays, clips now and then, and a scaler that searches its scale at first."""
    rng = np.random.default_rng((7, place))
    signals["lr"] = {"all": 1e-3 * min(place / 50, 0.5 + 0.5 * math.cos(place / 3000))}
    signals["update_ratio"] = {"all": 1e-3 * math.exp(0.1 * float(rng.normal()))}
    signals["moment_rms"] = {"exp_avg_sq": {"all": 1e-4}, "exp_avg": {"all": 1e-3}}
    signals["clip_ratio"] = 0.5 * math.exp(0.4 * float(rng.normal()))
    signals["loss_scale"] = 2.0 ** (24 - min(max(place - 8, 0), 8)) * (0.5 if place % 500 < 100 else 1)
    signals["skipped"] = float(9 <= place <= 16 or place % 500 == 0)
    signals["optimizer_step"] = float(max(place - 8, place if place < 9 else 8))


def after(step: int, **changes: Any) -> Any:
    def change(place: int, signals: dict[str, Any]) -> None:
        healthy(place, signals)
        if place > step:
            signals.update({name: value(place) if callable(value) else value for name, value in changes.items()})

    return change


def test_an_optimizer_that_works_is_silent() -> None:
    assert fired(stream(0, 2500, healthy)) == {}


@pytest.mark.parametrize(
    ("rule", "changes", "within"),
    [
        (
            "TrainingUpdateCollapse",
            {"update_ratio": {"all": 1e-4}, "moment_rms": {"exp_avg_sq": {"all": 1e-3}}},
            20,
        ),
        ("TrainingUpdateRatioOutOfBand", {"update_ratio": {"all": 0.2}}, 200),
        ("TrainingLrJump", {"lr": {"all": 5e-3}}, 1),
        ("TrainingClipSaturation", {"clip_ratio": 3.0}, 1200),
        ("TrainingLossScaleCollapse", {"loss_scale": lambda place: 2.0 ** (16 - (place - 1200))}, 6),
        ("TrainingNoUpdates", {"skipped": 1.0}, 60),
        ("TrainingNoUpdates", {"optimizer_step": 1192.0}, 200),
        ("TrainingLossTooLow", {"loss": lambda place: 0.2 + 0.02 * math.sin(place)}, 12),
    ],
)
def test_the_rule_sees_its_event_and_nothing_before(rule: str, changes: dict[str, Any], within: int) -> None:
    found = fired(stream(1, 2500, after(1200, **changes)))
    step, since = found[rule]
    assert 1200 < since <= step <= 1200 + within
    assert all(first > 1200 for first, _ in found.values())


def test_a_gradient_that_grows_over_the_whole_run_is_a_drift() -> None:
    def growing(place: int, signals: dict[str, Any]) -> None:
        norm = math.exp(place / 12_000 + 0.2 * float(np.random.default_rng((3, place)).normal()))
        signals["grad_norm"] = {"all": norm}

    found = fired(stream(2, 14_000, growing))
    assert found.keys() == {"TrainingNormGrowth"}


def test_a_scale_below_all_use_is_seen_at_once() -> None:
    def zero(place: int, signals: dict[str, Any]) -> None:
        healthy(place, signals)
        signals["loss_scale"] = 0.0

    assert fired(stream(3, 60, zero))["TrainingLossScaleCollapse"][0] <= 50
