from __future__ import annotations

from dataclasses import replace

from tests.rules.core.made_up_facts import at, facts
from trainwarden.rules.core.attribution.instrument import find
from trainwarden.rules.core.facts import NotPossible


def test_a_unit_in_doubt_speaks_for_the_instrument_and_names_no_cause_alone() -> None:
    (found,) = find(replace(facts(), doubted=True))
    assert (found.cause, found.weight) == ("instrument", 0.45)


def test_a_norm_that_repeats_and_a_loss_of_exactly_zero_are_told() -> None:
    (found,) = find(facts(at(range(305, 315), grad_norm={"all": 464441.887})))
    assert (found.cause, found.step) == ("", 305)
    assert "10 records from step 305" in found.says
    (masked,) = find(facts(at(range(310, 321), loss=0.0)))
    assert "exactly 0 in 11 records" in masked.says


def test_healthy_numbers_are_ruled_out_and_too_few_cannot_be_told() -> None:
    assert find(facts()) == []
    assert isinstance(find(facts(last=303)), NotPossible)
