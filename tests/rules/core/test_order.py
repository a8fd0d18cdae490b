"""An order between two signals is told only where it exceeds the cadence of both (design §4.2)."""

from __future__ import annotations

from typing import Any

from tests.rules.core.made_up_facts import at, facts
from trainwarden.rules.core.order import First, first_signs, in_order

LOSS = at(range(305, 321), loss=lambda old: old + 2.0)


def gradient(step: int, signals: dict[str, Any]) -> None:
    if step >= 301:
        signals["grad_norm"] = {"all": 40.0}


def update(step: int, signals: dict[str, Any]) -> None:
    if step % 10 == 0:
        signals["update_ratio"] = {"all": 1e-3 * (1 + 0.01 * (step % 7)) * (50.0 if step >= 310 else 1.0)}


def test_a_gradient_that_led_the_loss_by_four_steps_is_told_to_have_been_first() -> None:
    found = first_signs(facts(gradient, LOSS))
    assert [(one.signal, one.step) for one in found] == [("grad_norm", 301), ("loss", 305)]
    assert in_order(found) == "First grad_norm at step 301, then loss at step 305."


def test_a_slower_signal_within_its_cadence_is_told_together_with_the_others() -> None:
    found = first_signs(facts(gradient, update, LOSS, last=330))
    assert [one.signal for one in found] == ["grad_norm", "loss", "update_ratio"]
    assert found[-1].cadence == 10
    assert in_order(found) == "First grad_norm at step 301, then loss at step 305 and update_ratio at step 310."


def test_one_signal_has_no_order() -> None:
    assert in_order([First("loss", 5, 1)]) == ""
    assert (
        in_order([First("grad_norm", 5, 10), First("loss", 9, 1)])
        == "At about the same time: grad_norm at step 5 and loss at step 9."
    )
