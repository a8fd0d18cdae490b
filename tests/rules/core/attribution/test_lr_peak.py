from __future__ import annotations

from typing import Any

from tests.rules.core.made_up_facts import facts
from trainwarden.rules.core.attribution import learning_rate, lr_peak
from trainwarden.rules.core.facts import NotPossible


def warm(until: int) -> Any:
    def change(step: int, signals: dict[str, Any]) -> None:
        signals["lr"] = {"all": 1e-3 * min(step / until, 1.0)}

    return change


def without_rate(step: int, signals: dict[str, Any]) -> None:
    signals.pop("lr", None)


def test_an_onset_shortly_behind_the_top_of_a_warm_up_speaks_for_the_rate() -> None:
    (found,) = lr_peak.find(facts(warm(250), onset=301))
    assert (found.cause, found.weight, found.step) == ("learning_rate", 0.4, 250)
    assert "51 steps before the onset" in found.says
    (steady,) = learning_rate.find(facts(warm(250), onset=301))
    assert (steady.weight, steady.absent) == (0.0, True)  # that the rate stood still does not clear it there


def test_long_behind_the_top_it_says_nothing_and_the_steady_rate_is_cleared() -> None:
    far = facts(warm(100), onset=301)
    assert lr_peak.find(far) == []
    (steady,) = learning_rate.find(far)
    assert (steady.weight, steady.absent) == (-0.3, True)


def test_without_a_recorded_rate_it_cannot_look() -> None:
    assert lr_peak.find(facts(without_rate)) == NotPossible("no learning rate is recorded")
