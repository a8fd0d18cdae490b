from __future__ import annotations

from dataclasses import replace
from typing import Any

from tests.rules.core.made_up_facts import facts
from trainwarden.rules.core.attribution.reduced_norm import find
from trainwarden.rules.core.facts import Facts, NotPossible


def own(step: int, signals: dict[str, Any]) -> None:
    signals["rank_grad_norm"] = 1.4 * signals["grad_norm"]["all"]
    if step >= 301:
        signals["grad_norm"] = {"all": 30 * signals["grad_norm"]["all"]}


def of_ranks(found: Facts, n: int = 4) -> Facts:
    return replace(found, whose=replace(found.whose, of_ranks=n))


def test_a_reduced_norm_that_the_parts_do_not_give_is_the_communications() -> None:
    (found,) = find(of_ranks(facts(own)))
    assert (found.cause, found.weight) == ("distributed", 0.6)


def test_beside_the_rule_on_the_same_numbers_it_is_no_second_witness() -> None:
    (found,) = find(replace(of_ranks(facts(own)), blamed=(("TrainingReductionOff", "distributed", 301, 30.0),)))
    assert found.weight == 0.0


def test_one_rank_or_no_norms_of_ranks_cannot_be_looked_at() -> None:
    assert find(facts(own)) == NotPossible("one rank only")
    assert isinstance(find(of_ranks(facts())), NotPossible)
