from __future__ import annotations

from typing import Any

from tests.rules.core.made_up_facts import at, facts
from trainwarden.rules.core.attribution.moments import find


def test_a_counter_that_goes_back_means_that_the_bias_correction_began_anew() -> None:
    (found,) = find(facts(at(range(290, 291), optimizer_step=290.0), at(range(300, 301), optimizer_step=3.0)))
    assert (found.cause, found.step) == ("optimizer_state", 300)


def test_a_first_moment_that_grows_alone_is_the_optimizers_doing() -> None:
    def moments(step: int, signals: dict[str, Any]) -> None:
        jitter = 1 + 0.01 * (step % 5)
        grown = 2.2 if step >= 300 else 1.0
        signals["moment_rms"] = {"exp_avg": {"all": 1e-4 * grown * jitter}, "exp_avg_sq": {"all": 1e-8 * jitter}}

    (found,) = find(facts(moments))
    assert found.cause == "optimizer_state"
    assert "first moment" in found.says


def test_a_healthy_optimizer_says_nothing() -> None:
    assert find(facts()) == []
