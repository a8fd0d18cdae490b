from __future__ import annotations

from typing import Any

from tests.rules.core.made_up_facts import facts
from trainwarden.rules.core.attribution.scale_trend import find
from trainwarden.rules.core.facts import NotPossible


def falling_from(first: int) -> Any:
    def change(step: int, signals: dict[str, Any]) -> None:
        signals["loss_scale"] = 65536.0 / 2 ** (max(0, step - first) // 60)

    return change


def test_a_scale_that_fell_for_long_speaks_for_numerics_and_against_the_batch() -> None:
    found = {one.cause: one for one in find(facts(falling_from(300), onset=801, last=820))}
    assert set(found) == {"numeric", "data"}
    assert found["numeric"].weight == 0.2
    assert found["data"].weight == -0.3
    assert 300 <= (found["numeric"].step or 0) < 420


def test_a_steady_scale_says_nothing_and_without_one_it_cannot_look() -> None:
    assert find(facts(falling_from(9000), onset=801, last=820)) == []
    assert find(facts()) == NotPossible("no loss scale is recorded")
