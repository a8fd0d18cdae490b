from __future__ import annotations

from dataclasses import replace

from tests.rules.core.made_up_facts import at, facts
from trainwarden.rules.core.attribution.one_step import find
from trainwarden.rules.core.facts import NotPossible


def test_one_record_alone_is_as_wide_as_a_batch() -> None:
    (found,) = find(facts(at(range(301, 302), loss=lambda old: old + 1.5)))
    assert (found.cause, found.weight, found.step) == ("data", 0.2, 301)


def test_several_records_are_no_batch_and_neither_is_one_that_nothing_follows_yet() -> None:
    assert find(facts(at(range(301, 305), loss=lambda old: old + 1.5))) == []
    young = find(facts(at(range(301, 302), loss=lambda old: old + 1.5), last=302))
    assert isinstance(young, NotPossible)
    assert "fewer than 3 records" in young.why


def test_without_a_trend_it_cannot_look() -> None:
    assert isinstance(find(replace(facts(), trend=None)), NotPossible)
