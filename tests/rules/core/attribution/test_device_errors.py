from __future__ import annotations

from dataclasses import replace
from typing import Any

from tests.rules.core.made_up_facts import at, facts
from trainwarden.rules.core.attribution import weigh
from trainwarden.rules.core.attribution.device_errors import find
from trainwarden.rules.core.devices import FAULT, Told
from trainwarden.rules.core.facts import Facts, NotPossible
from trainwarden.rules.core.ranks import Whose
from trainwarden.rules.core.ranks_apart import Named


def told(step: int = 300, code: int = 79, weight: float = FAULT, fault: bool = True) -> Told:
    return Told(step, 5, code, "it fell off the bus", weight, fault, "h7")


def of(*devices: Told, **more: Any) -> Facts:
    return replace(facts(), devices=devices, **more)


def test_a_fault_at_the_onset_is_hardware_and_speaks_against_all_else() -> None:
    found = find(of(told()))
    assert weigh(found, 301).name == "hardware"
    assert {one.cause for one in found if one.weight < 0} == {
        "data",
        "numeric",
        "learning_rate",
        "optimizer_state",
        "model",
    }
    assert "Rank 5 on h7" in found[0].says
    assert "h7" in found[0].test


def test_far_from_the_onset_it_speaks_softly_and_against_nothing() -> None:
    (one,) = find(of(told(step=100)))
    assert 0 < one.weight < 0.5


def test_a_rule_that_saw_the_same_has_spoken_already() -> None:
    found = find(of(told(), blamed=(("TrainingGpuFault", "hardware", 301, 1.0),)))
    assert [one.weight for one in found if one.cause == "hardware"] == [0.0]


def test_of_many_errors_a_few_are_told_and_the_first_alone_weighs() -> None:
    found = [one for one in find(of(*(told(code=code) for code in (79, 48, 74, 95, 62)))) if one.cause == "hardware"]
    assert [one.weight for one in found] == [FAULT, 0.0, 0.0]


def test_a_slowed_device_is_hardware_unless_the_loss_is_off_too() -> None:
    apart = {"throttled": Named((3,), 40, 250)}
    slow = of(whose=Whose(ranks=(3,), hosts=("h3",), apart=apart))  # type: ignore[arg-type]
    (one,) = find(slow)
    assert weigh([one], 301).name == "hardware"
    assert "rank 3 (on h3)" in one.says
    broken = facts(at(range(301, 321), loss=9.0))
    (one,) = find(replace(broken, whose=slow.whose))
    assert one.weight == 0.0


def test_nothing_is_said_where_no_device_said_anything() -> None:
    assert isinstance(find(facts()), NotPossible)
