from __future__ import annotations

from dataclasses import replace

from tests.rules.core.made_up_facts import at, facts
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


def test_growth_in_the_model_that_a_rule_sees_behind_a_risen_loss_may_be_its_consequence() -> None:
    risen = facts(at(range(301, 341), loss=lambda old: old + 2.0), last=340)
    weights = []
    for since in (290, 303, 320):
        answer = find(replace(risen, blamed=(("TrainingAttentionLogitGrowth", "model", since, 0.1),)))
        assert isinstance(answer, list)
        weights.append(answer[0].weight)
    assert weights == [0.8, 0.8, 0.2]
    other = find(replace(risen, blamed=(("TrainingTokenOutOfRange", "data", 320, 3.0),)))
    assert isinstance(other, list)
    assert other[0].weight == 0.8


def test_rules_that_name_one_cause_are_one_witness() -> None:
    growth, runaway = (
        ("TrainingAttentionLogitGrowth", "model", 280, 0.1),
        ("TrainingAttentionLogitRunaway", "model", 290, 0.2),
    )
    late, other = ("TrainingOutputLogitGrowth", "model", 320, 0.3), ("TrainingTokenOutOfRange", "data", 305, 3.0)
    risen = facts(at(range(301, 341), loss=lambda old: old + 2.0), last=340)
    for blamed, wanted in (
        ((growth, runaway, other), [0.8, 0.0, 0.8]),
        ((late, growth), [0.0, 0.8]),
        ((growth, late), [0.8, 0.0]),
    ):
        answer = find(replace(risen, blamed=blamed))
        assert isinstance(answer, list)
        assert [one.weight for one in answer] == wanted
