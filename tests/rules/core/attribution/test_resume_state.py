from __future__ import annotations

from tests.rules.core.made_up_facts import at
from tests.rules.core.made_up_resumes import resumed
from trainwarden.rules.core.attribution.resume_state import find
from trainwarden.rules.core.facts import NotPossible
from trainwarden.rules.core.resumed import Planned

BEGINS_ANEW = at(range(310, 341, 10), optimizer_step=lambda old: old - 300)


def test_a_counter_below_that_before_the_resume_was_not_restored() -> None:
    (found,) = find(resumed(BEGINS_ANEW))
    assert (found.cause, found.step) == ("optimizer_state", 310)
    assert "is 10 at step 310 and was 300 before" in found.says


def test_an_update_that_grew_under_the_same_rate_is_the_states() -> None:
    (found,) = find(resumed(at(range(301, 306), update_ratio={"all": 2.2e-3})))
    assert found.cause == "optimizer_state"
    assert "same learning rate" in found.says


def test_an_update_that_grew_with_the_rate_is_not() -> None:
    assert find(resumed(at(range(301, 341), update_ratio={"all": 2.2e-3}, lr={"all": 2e-3}))) == []


def test_a_reset_that_a_plan_asked_for_is_none() -> None:
    assert isinstance(find(resumed(BEGINS_ANEW, planned=Planned(changed=("reset",)))), NotPossible)


def test_a_healthy_resume_and_one_far_away_say_nothing() -> None:
    assert find(resumed()) == []
    assert find(resumed(BEGINS_ANEW, onset=640, last=650)) == []
