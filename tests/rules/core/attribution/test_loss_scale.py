from __future__ import annotations

from typing import Any

from tests.rules.core.made_up_facts import at, facts
from trainwarden.rules.core.attribution.loss_scale import find


def scale(step: int, signals: dict[str, Any]) -> None:
    signals["loss_scale"] = 65536.0


def test_a_fall_of_several_halvings_is_numeric() -> None:
    def falls(step: int, signals: dict[str, Any]) -> None:
        if step >= 299:
            signals["loss_scale"] = 65536.0 / 2 ** min(step - 298, 5)

    (found,) = find(facts(scale, falls))
    assert found.cause == "numeric"
    assert "5 halvings" in found.says


def test_skipped_steps_count_without_a_scale() -> None:
    (found,) = find(facts(at(range(301, 306), skipped=1.0)))
    assert found.cause == "numeric"


def test_one_back_off_is_by_design() -> None:
    assert find(facts(scale, at(range(300, 400), loss_scale=32768.0), at(range(300, 301), skipped=1.0))) == []


def test_a_scaler_that_skips_most_steps_does_not_work() -> None:
    (few,) = find(facts(scale, at(range(301, 311), skipped=1.0), last=350))
    (most,) = find(facts(scale, at(range(301, 341), skipped=1.0), last=350))
    assert (few.weight, most.weight) == (0.4, 0.7)
