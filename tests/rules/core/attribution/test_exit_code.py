"""The exit code of a framework that made the step again (case E10)."""

from __future__ import annotations

from dataclasses import replace

from tests.rules.core.made_up_facts import facts
from trainwarden.rules.core.attribution import exit_code, weigh
from trainwarden.rules.core.facts import Facts, NotPossible


def ended(code: int | None) -> Facts:
    return replace(facts(), exit_code=code)


def test_another_result_is_a_passing_fault_of_the_numbers_and_a_device_is_suspect() -> None:
    found = exit_code.find(ended(17))
    assert not isinstance(found, NotPossible)
    cause = weigh(found, 300)
    assert cause.name == "numeric"
    assert 0 < cause.scores["hardware"] < cause.scores["numeric"]
    assert "data" not in cause.scores


def test_the_same_result_is_deterministic_and_names_no_cause_alone() -> None:
    found = exit_code.find(ended(16))
    assert not isinstance(found, NotPossible)
    cause = weigh(found, 300)
    assert cause.name == "undetermined"
    assert {"numeric", "data", "hardware"} == set(cause.scores)


def test_without_such_a_code_it_is_not_possible_to_tell() -> None:
    assert isinstance(exit_code.find(ended(None)), NotPossible)
