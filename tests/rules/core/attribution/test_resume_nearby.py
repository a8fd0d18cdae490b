from __future__ import annotations

from tests.rules.core.made_up_facts import facts
from trainwarden.rules.core.attribution.resume_nearby import find
from trainwarden.rules.core.facts import NotPossible


def test_an_onset_shortly_after_a_resume_is_suspect() -> None:
    (found,) = find(facts(first=290, onset=301, resumed_from=289))
    assert found.cause == "optimizer_state"
    assert "11 steps before" in found.says


def test_an_onset_long_after_a_resume_or_without_one_is_not() -> None:
    assert find(facts(first=200, onset=301, resumed_from=199)) == []
    assert isinstance(find(facts(first=290, onset=301)), NotPossible)
