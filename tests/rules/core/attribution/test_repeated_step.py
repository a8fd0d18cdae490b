from __future__ import annotations

from tests.rules.core.made_up_facts import facts
from trainwarden.rules.core.attribution.repeated_step import find
from trainwarden.rules.core.facts import Earlier


def test_the_same_step_again_is_data_or_a_kernel() -> None:
    found = find(facts(onset=301, earlier=(Earlier("i", 0, 300, 250, "data"),), first=200))
    assert {one.cause for one in found} == {"data", "numeric"}


def test_the_same_time_since_the_start_is_the_process_and_not_the_data() -> None:
    (found,) = find(facts(onset=301, first=200, earlier=(Earlier("i", 0, 900, 101, "data"),)))
    assert found.cause == "data"
    assert found.weight < 0


def test_another_place_and_time_say_nothing() -> None:
    assert find(facts(onset=301, earlier=(Earlier("i", 0, 900, 50, "data"),))) == []
