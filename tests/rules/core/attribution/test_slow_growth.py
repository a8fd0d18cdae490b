from __future__ import annotations

from typing import Any

from tests.rules.core.made_up_facts import facts
from trainwarden.rules.core.attribution.slow_growth import find
from trainwarden.rules.core.facts import NotPossible


def weights(step: int, signals: dict[str, Any]) -> None:
    if step % 5 == 0:
        signals["weight_rms"] = {"all": 0.02 * 2 ** (step / 120)}


def slower(step: int, signals: dict[str, Any]) -> None:
    if step % 5 == 0:
        signals["weight_rms"] = {"all": 0.02 * (1 + step) ** 0.5}


def in_a_line(step: int, signals: dict[str, Any]) -> None:
    if step % 5 == 0:
        signals["weight_rms"] = {"all": 0.02 * (1 + step / 40)}


def test_weights_that_double_without_slowing_down_speak_for_the_model() -> None:
    (found,) = find(facts(weights))
    assert (found.cause, found.weight) == ("model", 0.3)
    assert found.says.startswith("weight_rms grew from")


def test_weights_that_grow_ever_more_slowly_are_a_young_run() -> None:
    assert find(facts(slower)) == []
    assert find(facts(in_a_line)) == []  # doubled, and less from the middle to the end than before
    assert isinstance(find(facts()), NotPossible)
