from __future__ import annotations

from dataclasses import replace

from tests.rules.core.made_up_facts import facts
from trainwarden.rules.core.attribution import attribute
from trainwarden.rules.core.attribution.rules_say import find


def test_a_rule_that_names_a_cause_speaks_for_it_with_its_value() -> None:
    blamed = (("TrainingTokenOutOfRange", "data", 305, 3.0),)
    (found,) = find(replace(facts(), blamed=blamed))
    assert (found.cause, found.step) == ("data", 305)
    assert "TrainingTokenOutOfRange fired at 3" in found.says
    assert attribute(replace(facts(), blamed=blamed)).name == "data"


def test_a_word_that_is_no_cause_says_nothing() -> None:
    assert find(replace(facts(), blamed=(("Mine", "moonlight", 305, None),))) == []


def test_a_rule_without_a_cause_says_nothing() -> None:
    assert find(facts()) == []
