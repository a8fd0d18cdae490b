from __future__ import annotations

import pytest

from tests.rules.core.made_up_facts import at
from tests.rules.core.made_up_resumes import resumed
from trainwarden.rules.core.attribution.resume_rate import find
from trainwarden.rules.core.facts import NotPossible
from trainwarden.rules.core.resumed import Planned


def rate(factor: float) -> object:
    return at(range(301, 341), lr=lambda old: {"all": old["all"] * factor})


@pytest.mark.parametrize("factor", [0.0, 0.3, 1.1, 7.0])
def test_a_rate_that_is_off_behind_a_resume_was_not_restored(factor: float) -> None:
    (found,) = find(resumed(rate(factor)))  # type: ignore[arg-type]
    assert (found.cause, found.step) == ("learning_rate", 301)


@pytest.mark.parametrize("at_step", [5, 10, 19, 20, 25, 300])
def test_a_schedule_that_goes_on_is_none_be_it_in_its_warm_up(at_step: int) -> None:
    assert find(resumed(at=at_step, onset=at_step + 5, last=at_step + 20)) == []


def test_the_factor_of_a_plan_is_expected() -> None:
    half = Planned(lr_factor=0.5, changed=("factor",))
    assert find(resumed(rate(0.5), planned=half)) == []  # type: ignore[arg-type]
    assert len(find(resumed(planned=half))) == 1


def test_an_announced_schedule_is_none() -> None:
    assert isinstance(find(resumed(rate(7.0), planned=Planned(changed=("lr_phase",)))), NotPossible)  # type: ignore[arg-type]
