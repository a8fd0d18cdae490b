"""What an attempt runs with that the one before did not (case F01)."""

from __future__ import annotations

from dataclasses import replace

from tests.rules.core.made_up_facts import facts
from trainwarden.rules.core.attribution import other_environment
from trainwarden.rules.core.facts import NotPossible


def test_what_is_another_one_is_told_and_weighs_nothing() -> None:
    found = other_environment.find(replace(facts(), environment="torch 1.12.0 -> 1.13.1"))
    assert not isinstance(found, NotPossible)
    (one,) = found
    assert "torch 1.12.0 -> 1.13.1" in one.says
    assert (one.cause, one.weight) == ("", 0.0)


def test_the_same_environment_is_ruled_out_and_an_unknown_one_cannot_be_told() -> None:
    assert other_environment.find(replace(facts(), environment="")) == []
    assert isinstance(other_environment.find(facts()), NotPossible)
