from __future__ import annotations

from dataclasses import replace

from tests.rules.core.made_up_facts import facts
from trainwarden.rules.core.attribution import weigh
from trainwarden.rules.core.attribution.hardware import find
from trainwarden.rules.core.facts import Earlier, Facts, NotPossible
from trainwarden.rules.core.ranks import Whose


def of(*earlier: Earlier, of_hosts: int = 8, kind: str = "nonfinite", onset: int = 301, **more: object) -> Facts:
    made = facts(onset=onset, first=200, earlier=earlier)
    whose = Whose(kind=kind, step=onset, ranks=(5,), hosts=("h7",), of_ranks=8, of_hosts=of_hosts)  # type: ignore[arg-type]
    return replace(made, whose=replace(whose, **more))  # type: ignore[arg-type]


def before(onset: int = 900, host: str = "h7", **more: object) -> Earlier:
    return Earlier("i", 0, onset, 50, "undetermined", ranks=(1,), hosts=(host,), **more)  # type: ignore[arg-type]


def test_one_rank_alone_is_its_data_or_its_hardware_and_nothing_that_all_share() -> None:
    found = find(of())
    assert {one.cause for one in found if one.weight > 0} == {"hardware", "data"}
    assert {one.cause for one in found if one.weight < 0} == {"numeric", "optimizer_state", "learning_rate", "model"}
    assert "Rank 5 on h7" in found[0].says


def test_the_same_host_with_other_data_is_hardware() -> None:
    cause = weigh(find(of(before())), 301)
    assert cause.name == "hardware"
    assert "data" in cause.scores
    assert cause.scores["data"] < 0.2


def test_the_same_host_at_the_same_step_may_be_its_samples() -> None:
    assert weigh(find(of(before(onset=301))), 301).name == "undetermined"


def test_another_host_says_nothing_and_a_coincidence_counts_little_where_hosts_are_few() -> None:
    assert len(find(of(before(host="h3")))) == len(find(of()))
    many, few = (weigh(find(of(before(), of_hosts=hosts)), 301).scores["hardware"] for hosts in (64, 2))
    assert many > 0.85 > 0.65 > few


def test_the_only_host_proves_nothing_but_the_same_rank_of_it_does() -> None:
    alone = before()
    assert len(find(of(alone, of_hosts=1))) == len(find(of()))
    same_rank = replace_ranks(alone, (5,))
    assert weigh(find(of(same_rank, of_hosts=1)), 301).name == "hardware"


def replace_ranks(earlier: Earlier, ranks: tuple[int, ...]) -> Earlier:
    return Earlier(earlier.id, earlier.attempt, earlier.onset, earlier.since_start, earlier.cause, ranks, earlier.hosts)


def test_a_failure_is_never_the_datas_and_the_same_domain_again_is_hardware() -> None:
    first = of(kind="failed", domains=("r1",), of_domains=8, says="Rank 5 failed first.")
    assert all(one.weight < 0 for one in find(first) if one.cause != "hardware")
    again = of(before(host="h3", domains=("r1",)), kind="failed", domains=("r1",), of_domains=8, says="Rank 5 first.")
    assert weigh(find(again), 301).name == "hardware"


def test_nothing_is_said_of_a_run_of_one_rank() -> None:
    assert isinstance(find(facts()), NotPossible)
