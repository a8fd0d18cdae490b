from __future__ import annotations

from typing import Any

from tests.rules.core.made_up_facts import at, facts
from trainwarden.rules.core.attribution.underflow import find
from trainwarden.rules.core.facts import NotPossible


def zeros(step: int, signals: dict[str, Any]) -> None:
    signals["grad_zero_ratio"] = {"all": 0.7 if step >= 295 else 0.05 + 0.001 * (step % 5)}


def swallowed(step: int, signals: dict[str, Any]) -> None:
    signals["update_ratio"] = {"all": 1e-3}
    signals["update_applied_ratio"] = {"all": 1e-3 if step < 301 else 1e-4}


def test_zeros_in_the_gradient_speak_for_numerics() -> None:
    (found,) = find(facts(zeros))
    assert (found.cause, found.weight, found.step) == ("numeric", 0.4, 295)
    assert "70 %" in found.says


def test_updates_that_do_not_arrive_speak_for_numerics() -> None:
    (found,) = find(facts(swallowed))
    assert (found.cause, found.weight) == ("numeric", 0.4)
    assert "10 % arrive" in found.says


def test_odd_batches_leave_zeros_too_and_without_either_signal_it_cannot_look() -> None:
    dirty = find(facts(zeros, at(range(301, 321), batch_longest_repeat_tokens=4000.0)))
    assert isinstance(dirty, NotPossible)
    assert "odd" in dirty.why
    assert isinstance(find(facts()), NotPossible)
