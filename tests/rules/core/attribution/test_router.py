from __future__ import annotations

from typing import Any

from tests.rules.core.made_up_facts import facts
from trainwarden.rules.core.attribution.router import find
from trainwarden.rules.core.facts import NotPossible


def logits(step: int, signals: dict[str, Any]) -> None:
    signals["router_z"] = {"all": 4.0 + 0.1 * (step % 3) + (20.0 if step >= 296 else 0.0)}


def steady(step: int, signals: dict[str, Any]) -> None:
    signals["router_z"] = {"all": 4.0 + 0.1 * (step % 3)}


def dead(step: int, signals: dict[str, Any]) -> None:
    signals["dead_experts"] = {"all": 0.0 if step < 290 else 3.0}


def test_router_logits_that_left_their_range_speak_for_the_model() -> None:
    (found,) = find(facts(logits))
    assert (found.cause, found.weight, found.step) == ("model", 0.4, 296)


def test_experts_that_died_speak_for_the_model() -> None:
    (found,) = find(facts(dead))
    assert "3 experts" in found.says


def test_a_steady_router_says_nothing_and_without_one_it_cannot_look() -> None:
    assert find(facts(steady)) == []
    assert isinstance(find(facts()), NotPossible)
