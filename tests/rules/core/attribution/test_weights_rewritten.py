from __future__ import annotations

from typing import Any

import pytest

from tests.rules.core.made_up_facts import at, facts
from tests.rules.core.runs import Change
from trainwarden.rules.core.attribution.weights_rewritten import find
from trainwarden.rules.core.facts import Facts, Finding, NotPossible


def weights(of: Any, every: int = 10, ratio: float = 0.003) -> Change:
    """Give the weights an RMS, and updates of a share of it, at every so many steps."""

    def change(step: int, signals: dict[str, Any]) -> None:
        if step % every == 0 or step >= 300:
            signals["weight_rms"] = {"all": of(step)}
            signals["update_ratio"] = {"all": ratio}
        else:
            signals.pop("update_ratio", None)

    return change


def the_one(given: Facts) -> Finding:
    answer = find(given)
    assert isinstance(answer, list)
    (found,) = answer
    return found


@pytest.mark.parametrize("after", [0.2, 3e34, float("inf")])
def test_weights_that_jump_further_than_updates_reach_were_written_by_something_else(after: float) -> None:
    found = the_one(facts(weights(lambda step: after if step >= 301 else 0.07)))
    assert (found.cause, found.weight) == ("hardware", 0.75)
    assert "something else wrote to them" in found.says


def test_right_behind_an_evaluation_it_is_the_evaluations() -> None:
    given = facts(weights(lambda step: 0.09 if step >= 301 else 0.07))
    given.events.steps["evaluation"] = [300]
    assert the_one(given).cause == "optimizer_state"


def test_weights_that_grow_on_and_on_are_the_programs() -> None:
    found = the_one(facts(weights(lambda step: 0.07 * 1.03 ** max(0, step - 290)), last=350))
    assert found.cause == "model"


def test_what_updates_explain_is_no_finding() -> None:
    assert find(facts(weights(lambda step: 0.07 * 1.002**step, ratio=0.004))) == []
    assert find(facts(weights(lambda step: 0.08 if step >= 301 else 0.07, ratio=0.1))) == []


def test_an_update_that_nobody_measured_may_be_as_large_as_its_gradient_or_its_rate() -> None:
    jumped = weights(lambda step: 0.2 if step >= 310 else 0.07)
    assert find(facts(jumped, at(range(301, 320), grad_norm=lambda old: {"all": 1e6}))) == []
    assert find(facts(jumped, at(range(301, 320), lr=lambda old: {"all": 1e3}))) == []


def test_without_the_size_of_weights_or_updates_it_cannot_look() -> None:
    assert isinstance(find(facts()), NotPossible)
