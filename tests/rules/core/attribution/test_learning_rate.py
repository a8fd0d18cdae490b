from __future__ import annotations

from typing import Any

from tests.rules.core.made_up_facts import at, facts
from tests.rules.core.made_up_resumes import resumed
from trainwarden.rules.core.attribution.learning_rate import find
from trainwarden.rules.core.facts import NotPossible


def test_a_jump_shortly_before_the_onset_speaks_for_it() -> None:
    (found,) = find(facts(at(range(295, 400), lr={"all": 4e-3})))
    assert (found.cause, found.step) == ("learning_rate", 295)
    assert found.weight > 0.5


def test_the_top_of_a_warm_up_is_suspect() -> None:
    def rising(step: int, signals: dict[str, Any]) -> None:
        signals["lr"] = {"all": 1e-6 * step}

    (found,) = find(facts(rising))
    assert found.cause == "learning_rate"
    assert 0 < found.weight < 0.5


def test_a_steady_rate_speaks_against_it() -> None:
    (found,) = find(facts())
    assert (found.cause, found.weight) == ("learning_rate", -0.3)


def test_a_rate_that_is_not_known_says_nothing() -> None:
    assert isinstance(find(facts(at(range(400), lr={}))), NotPossible)


def test_a_rate_that_fell_at_the_onset_or_over_the_resume_is_not_cleared_as_steady() -> None:
    def fell(step: int, signals: dict[str, Any]) -> None:
        if step >= 301:
            signals["lr"] = {"all": 1e-5}

    assert find(facts(fell)) == []
    assert find(resumed(fell, onset=303)) == []
    (steady,) = find(resumed(onset=303))
    assert steady.weight == -0.3
