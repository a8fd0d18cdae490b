"""Samples that spiked before are evidence for the data, as far as nothing else repeats with them."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from tests.rules.core.made_up_facts import facts
from trainwarden.rules.core.attribution import weigh
from trainwarden.rules.core.attribution.known_suspects import find
from trainwarden.rules.core.facts import Facts, NotPossible
from trainwarden.rules.core.sightings import Again, Known, Met, Sighting


def known(how: Any = "run", step: int = 120, chance: float = 0.0, **changed: Any) -> Known:
    fields: dict[str, Any] = {
        "id": "sus_a", "incident": "inc_a", "run": "a", "run_uid": "uid-a", "attempt": 0, "start_id": "s", "step": step,
        "dataset": "web", "version": "v", "order": "o", "epoch": 0, "samples": [(0, 16)], "rows": {"x": [(0, 16)]},
        "positions": [], "cause": "data", "verdict": "transient_spike", "confidence": 0.8, "weak": False,
        "first_seen": 1.0, "last_seen": 1.0,
    }  # fmt: skip
    seen = Sighting(**{**fields, **changed})
    return Known(seen, Met(seen.id, 301, 0, [(4800, 4816)], 1.0, chance), how)


def told(*remembered: Known) -> Facts:
    return replace(facts(), known=remembered, run_uid="uid-b")


@pytest.mark.parametrize(
    ("one", "weight"),
    [
        (known(state="confirmed", again=[Again(incident="i", run="c", attempt=0, step=9, how="run")]), 0.75),
        (known(), 0.6),
        (known(weak=True, cause="undetermined", verdict="outlier"), 0.45),
        (known("twin", step=301), 0.3),
        (known(chance=0.1), 0.54),
        (known(chance=0.3), 0.0),
    ],
)
def test_what_it_weighs_depends_on_what_else_repeats(one: Known, weight: float) -> None:
    found = find(told(one))
    assert isinstance(found, list)
    (finding,) = found
    assert finding.weight == weight
    assert finding.cause == ("data" if weight else "")
    assert "run a, attempt 0, at step" in finding.says
    named = weigh(found, 301).name
    assert named == ("data" if weight >= 0.5 else "undetermined")


def test_an_attempt_that_made_the_same_step_again_is_another_lines_evidence() -> None:
    assert find(told(known("replay", step=301))) == []
    assert find(told(known("replay", step=120))) != []


def test_several_are_told_and_one_of_them_weighs() -> None:
    others = [known(id=f"sus_{at}", run=f"r{at}", weak=at > 0) for at in range(5)]
    found = find(told(*others))
    assert isinstance(found, list)
    assert [one.weight for one in found] == [0.6, 0.0, 0.0]


def test_where_nobody_tells_the_data_it_cannot_look() -> None:
    assert isinstance(find(facts()), NotPossible)
    assert find(told()) == []
