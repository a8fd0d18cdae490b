from __future__ import annotations

from typing import Any

from tests.rules.core.made_up_facts import at, facts
from trainwarden.rules.core.attribution.moment_jump import find
from trainwarden.rules.core.facts import NotPossible


def raised(step: int, signals: dict[str, Any]) -> None:
    second = 1e-6 if step < 301 else 8e-6 * 0.999 ** (step - 301)
    signals["moment_rms"] = {"exp_avg": {"all": 1e-3}, "exp_avg_sq": {"all": second}}
    signals["update_ratio"] = {"all": (1.0 + 0.01 * (step % 7)) * (1e-3 if step < 301 else 4e-4)}


def growing(step: int, signals: dict[str, Any]) -> None:
    signals["moment_rms"] = {
        "exp_avg": {"all": 1e-3},
        "exp_avg_sq": {"all": 1e-6 if step < 301 else 1e-6 * 2.5 ** (step - 300)},
    }


def test_a_second_moment_that_one_step_raised_holds_the_update_down() -> None:
    (found,) = find(facts(raised))
    assert (found.cause, found.weight, found.step) == ("optimizer_state", 0.5, 301)
    assert "1000 steps at beta2 0.999" in found.says


def test_a_moment_that_goes_on_growing_or_odd_batches_are_another_thing() -> None:
    assert find(facts(growing)) == []
    assert find(facts(raised, at(range(301, 310), batch_longest_repeat_tokens=4000.0))) == []


def test_without_the_moment_it_cannot_look() -> None:
    assert isinstance(find(facts()), NotPossible)
