from __future__ import annotations

from trainwarden.rules.core.attribution import weigh
from trainwarden.rules.core.facts import Finding


def finding(cause: str, weight: float) -> Finding:
    return Finding(kind="k", says="s", cause=cause, weight=weight)


def test_independent_witnesses_add_up_and_never_exceed_one() -> None:
    found = weigh([finding("data", 0.5), finding("data", 0.5), finding("data", 0.5)], 10)
    assert found.name == "data"
    assert found.scores == {"data": 0.875}
    assert 0 <= found.confidence <= 1


def test_what_speaks_against_a_cause_discounts_it() -> None:
    found = weigh([finding("data", 0.8), finding("data", -0.5)], 10)
    assert found.scores == {"data": 0.4}
    assert found.name == "undetermined"


def test_two_equal_suspects_are_undetermined_and_the_test_between_them_is_named() -> None:
    found = weigh([finding("data", 0.6), finding("numeric", 0.6)], 10)
    assert found.name == "undetermined"
    assert "float32" in found.cheapest_test
    assert "step 10" in found.cheapest_test


def test_without_any_evidence_it_is_undetermined() -> None:
    found = weigh([], 10)
    assert (found.name, found.confidence, found.scores) == ("undetermined", 0.0, {})
    assert found.cheapest_test
