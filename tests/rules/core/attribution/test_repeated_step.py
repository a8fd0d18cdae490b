from __future__ import annotations

from dataclasses import replace

import pytest

from tests.rules.core.made_up_facts import at, facts
from tests.rules.core.runs import Attempt
from trainwarden.record import Step
from trainwarden.rules.core.attribution import weigh
from trainwarden.rules.core.attribution.repeated_step import find
from trainwarden.rules.core.facts import Earlier
from trainwarden.rules.core.trace import Trace

NAN = at(range(301, 400), loss=float("nan"))


def attempt(seed: int = 0, last: int = 320) -> dict[int, Trace]:
    trace = Trace(limit=4000)
    for line in Attempt(last=last, seed=seed, checkpoint_every=0).lines():
        if isinstance(line, Step):
            trace.append(line)
    return {0: trace}


def test_the_same_step_again_is_data_or_a_kernel() -> None:
    found = find(facts(onset=301, earlier=(Earlier("i", 0, 300, 250, "data"),), first=200))
    assert {one.cause for one in found} == {"data", "numeric"}


def test_narrow_numbers_make_it_the_kernel_first_and_are_told() -> None:
    made = facts(NAN, onset=301, earlier=(Earlier("i", 0, 301, 250, "data"),), first=200)
    wide, narrow = (weigh(find(replace(made, versions=versions)), 301) for versions in ({}, {"precision": "fp8_e4m3"}))
    assert wide.scores["data"] > wide.scores["numeric"]
    assert narrow.scores["numeric"] > narrow.scores["data"]
    assert "another precision" in narrow.cheapest_test
    assert "precision fp8_e4m3" in narrow.findings[0].says


def test_the_same_step_with_other_data_is_not_the_batch() -> None:
    made = facts(onset=301, earlier=(Earlier("i", 0, 301, 250, "data"),), first=200)
    same, other = (weigh(find(replace(made, traces=attempt(seed))), 301) for seed in (0, 3))
    assert same.scores["data"] > 0.3
    assert "data" not in other.scores
    assert other.name in ("model", "learning_rate")


def test_near_the_same_step_is_the_schedule_and_not_the_batch() -> None:
    steady = at(range(1200, 2021), lr=3e-4)
    made = facts(steady, onset=2001, last=2020, earlier=(Earlier("i", 0, 2030, 2030, "data"),), first=1200)
    found = find(made)
    assert {one.cause for one in found if one.weight > 0} == {"learning_rate", "model"}
    assert weigh(found, 2001).name == "model"
    assert [one.weight < 0 for one in found if one.cause == "data"] == [True]


def test_a_rate_at_its_highest_is_suspect_before_the_model() -> None:
    made = facts(
        at(range(1, 2100), lr=lambda old: {"all": 0.0}),
        onset=2001,
        last=2020,
        earlier=(Earlier("i", 0, 2030, 2030, "data"),),
        first=1200,
        each=lambda record: record.signals.update(lr={"all": record.step * 1e-7}),
    )
    assert weigh(find(made), 2001).name == "learning_rate"


@pytest.mark.parametrize("first", [1950, 1998])
def test_an_attempt_that_hardly_ran_before_it_broke_near_the_same_step_proves_nothing(first: int) -> None:
    assert find(facts(onset=2001, last=2020, earlier=(Earlier("i", 0, 2030, 1000, "data"),), first=first)) == []


def test_the_same_time_since_the_start_is_the_process_and_not_the_data() -> None:
    found = find(facts(onset=301, first=200, earlier=(Earlier("i", 0, 900, 101, "data"),)))
    assert {one.cause for one in found} == {"data", "numeric"}
    assert all(one.weight < 0 for one in found)
    assert "process" in weigh(found, 301).cheapest_test


def test_another_place_and_time_say_nothing() -> None:
    assert find(facts(onset=301, earlier=(Earlier("i", 0, 900, 50, "data"),))) == []
