from __future__ import annotations

from dataclasses import replace

from tests.rules.core.made_up_facts import at, facts
from trainwarden.rules.core.attribution import weigh
from trainwarden.rules.core.attribution.distributed import find
from trainwarden.rules.core.facts import Facts
from trainwarden.rules.core.ranks import Whose


def of(offered: tuple[str, ...] = ("mismatch",), made: Facts | None = None, **whose: object) -> Facts:
    return replace(made or facts(), offered=offered, whose=Whose(**{"of_ranks": 8, **whose}))  # type: ignore[arg-type]


def test_ranks_that_hold_another_gradient_are_named() -> None:
    found = find(of(kind="shared", step=301, ranks=(3,), hosts=("h3",), differ=(3,), differing=8))
    assert weigh(found, 301).name == "distributed"
    assert "rank 3 (on h3)" in found[0].says
    assert {one.cause for one in found if one.weight < 0} >= {"data", "numeric", "learning_rate"}


def test_where_no_two_agree_nobody_is_named() -> None:
    (found, *_) = find(of(kind="shared", step=301, differing=8))
    assert "no two agree" in found.says


def test_a_difference_of_two_records_or_without_a_rule_is_none() -> None:
    assert find(of(kind="shared", differ=(3,), differing=2)) == []
    assert find(of(("other",), kind="shared", differ=(3,), differing=50)) == []


def test_the_same_loss_everywhere_is_the_sampler_unless_the_loss_is_what_is_wrong() -> None:
    assert weigh(find(of(same=60)), 301).name == "distributed"
    assert find(of(same=40)) == []
    assert find(of(made=facts(at(range(301, 320), loss=9.0)), same=60)) == []
