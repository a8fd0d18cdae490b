from __future__ import annotations

from typing import Any

from tests.rules.core.made_up_facts import facts
from trainwarden.rules.core.attribution.collapse import find
from trainwarden.rules.core.facts import NotPossible


def risen(step: int, signals: dict[str, Any]) -> None:
    if step >= 301:
        signals["loss"] += 0.05 * (step - 300)


def small_update(step: int, signals: dict[str, Any]) -> None:
    signals["update_ratio"] = {"all": (1.0 + 0.01 * (step % 7)) * (1e-3 if step < 301 else 1e-4)}


def small_gradient(step: int, signals: dict[str, Any]) -> None:
    if step >= 301:
        signals["grad_norm"] = {"all": signals["grad_norm"]["all"] * 0.05}


def lower_rate(step: int, signals: dict[str, Any]) -> None:
    if step >= 301:
        signals["lr"] = {"all": 0.1 * signals["lr"]["all"]}


def test_an_update_that_vanished_while_the_loss_rises_is_the_optimizers() -> None:
    (found,) = find(facts(risen, small_update, last=360))
    assert (found.cause, found.weight) == ("optimizer_state", 0.6)
    assert found.says.startswith("update_ratio is 10 %")


def test_a_gradient_that_vanished_weighs_less() -> None:
    (found,) = find(facts(risen, small_gradient, last=360))
    assert (found.cause, found.weight) == ("optimizer_state", 0.4)


def test_a_falling_loss_a_lower_rate_or_too_few_records_say_nothing_of_it() -> None:
    assert find(facts(small_update, last=360)) == []
    assert find(facts(risen, small_update, lower_rate, last=360)) == []
    assert isinstance(find(facts(risen, small_update, last=310)), NotPossible)
