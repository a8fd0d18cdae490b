"""What would have prevented it comes of the run's own numbers, and only where it applies."""

from __future__ import annotations

from typing import Any

from tests.rules.core.made_up_facts import at, facts
from tests.rules.core.runs import Change
from trainwarden.rules.core.facts import Facts
from trainwarden.rules.core.prevention import prevention


def surge(step: int, signals: dict[str, Any]) -> None:
    if step in range(301, 306):
        signals["grad_norm"] = {"all": 80.0}
        signals["loss"] += 1.0


def clipped_at(threshold: float) -> Change:
    def change(step: int, signals: dict[str, Any]) -> None:
        signals["clip_ratio"] = signals["grad_norm"]["all"] / threshold

    return change


def told(one: Facts, cause: str = "undetermined") -> dict[str, str]:
    return {advice.what: advice.says for advice in prevention(one, cause)}


def test_a_threshold_that_never_clips_is_told_with_one_that_would() -> None:
    says = told(facts(surge, clipped_at(20.0)))["clipping"]
    assert "threshold of 20 never clipped" in says
    assert "300 records" in says
    assert "reached 80" in says


def test_a_threshold_that_works_or_a_calm_gradient_needs_no_word() -> None:
    assert "clipping" not in told(facts(surge, clipped_at(1.0)))
    assert "clipping" not in told(facts(clipped_at(20.0)))
    assert "No clipping is recorded" in told(facts(surge))["clipping"]


def test_a_warm_up_that_was_too_short_is_told_with_its_own_length() -> None:
    def rate(step: int, signals: dict[str, Any]) -> None:
        signals["lr"] = {"all": 1e-3 * min(step / 280, 1.0)}

    high = at(range(301, 321), loss=lambda old: old + 1.0)
    assert "within 279 steps" in told(facts(rate, high), "learning_rate")["warm_up"]
    assert "warm_up" not in told(facts(rate, high), "data")


def test_a_surge_in_the_embedding_asks_for_its_shrink() -> None:
    def embedding(step: int, signals: dict[str, Any]) -> None:
        whole = signals["grad_norm"]["all"]
        signals["grad_norm"] = {"all": whole, "embedding": 0.98 * whole if step >= 301 else 0.2 * whole}

    says = told(facts(surge, embedding))["embedding_shrink"]
    assert "96 %" in says
    assert "shrink_embeddings" in says
    assert "embedding_shrink" not in told(facts(surge))


def test_a_scale_that_fell_time_and_again_is_told_with_where_it_ended() -> None:
    def scale(step: int, signals: dict[str, Any]) -> None:
        signals["loss_scale"] = 65536.0 / 2 ** max(0, min(step - 300, 5))

    says = told(facts(scale))["loss_scaler"]
    assert "from 65536 to 2048, by 5 halvings" in says
    assert "loss_scaler" not in told(facts())
