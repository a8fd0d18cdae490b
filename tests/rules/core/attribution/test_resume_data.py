from __future__ import annotations

from dataclasses import replace

from tests.rules.core.made_up_facts import at
from tests.rules.core.made_up_resumes import resumed
from trainwarden.rules.core.attribution.resume_data import find
from trainwarden.rules.core.facts import NotPossible
from trainwarden.rules.core.resumed import Planned

LOWER = at(range(301, 341), loss=lambda old: old - 0.2)
BACK = at(range(301, 341), sample_position=100.0)
AHEAD = at(range(301, 341), sample_position=300 * 16 + 400.0)


def test_a_loss_that_is_better_at_once_has_seen_its_data() -> None:
    (found,) = find(resumed(LOWER))
    assert (found.cause, found.step) == ("data", 301)
    assert "seen before" in found.says


def test_a_loss_that_is_worse_speaks_little_for_the_data() -> None:
    (found,) = find(resumed(at(range(301, 341), loss=lambda old: old + 0.2)))
    assert found.weight < 0.5


def test_a_position_that_went_back_or_ahead_is_the_loaders() -> None:
    assert ["not restored" in one.says for one in find(resumed(BACK))] == [True]
    assert ["never read" in one.says for one in find(resumed(AHEAD))] == [True]


def test_a_new_epoch_begins_at_the_front() -> None:
    assert find(resumed(BACK, at(range(301, 341), epoch=1.0))) == []


def test_what_was_announced_or_is_healthy_says_nothing() -> None:
    assert find(resumed()) == []
    assert isinstance(find(resumed(LOWER, BACK, planned=Planned(changed=("mixture",)))), NotPossible)
    assert isinstance(find(replace(resumed(LOWER, BACK), inherited=None)), NotPossible)
