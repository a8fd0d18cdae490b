"""Cases D01 and D05: what ranks should hold alike and do not, and a norm that each of them took of its own part."""

from __future__ import annotations

import math

import numpy as np
import pytest

from tests.cases.build import Row, Verdicts
from tests.cases.build_ranks import OfRank, Ranks, healthy, judge_ranks
from tests.cases.registry import case

EIGHT = [f"h{number}" for number in range(8)]


def layer_norms(of: dict[int, float], at: int = 1000, name: str = "ln_weight_norm", level: float = 32.0) -> OfRank:
    """Normal losses, one gradient norm, and weights that are one number until ``at`` and then part by ``of[rank]`` of it a step."""
    well = healthy()

    def make(step: int, rank: int, chance: np.random.Generator) -> Row:
        norm = level * (1 + 1e-5 * step) * (1 + of.get(rank, 0.0) * max(0, step - at))
        row = well(step, rank, chance)
        return row | ({name: {"all": 0.5, "norm": norm}} if name == "weight_rms" else {name: norm})

    return make


@case("D01")
@pytest.mark.parametrize("drifting", [[3], [1, 2, 3, 4, 5, 6, 7], [5, 6]])
@pytest.mark.parametrize("slope", [1e-5, 2e-6])
def test_d01_weights_that_part_on_some_ranks_are_distributed_a_warning_and_no_rollback(
    drifting: list[int], slope: float
) -> None:
    of = {rank: slope * (1 + place / 7) for place, rank in enumerate(drifting)}
    found = judge_ranks(Ranks(1, 1300, layer_norms(of), EIGHT, checkpoints=(500, 900, 1200)))
    (incident,) = found.told
    assert (incident["severity"], incident["verdict"], incident["cause"]["name"]) == (
        "warning",
        "mismatch",
        "distributed",
    )
    assert (incident["action"], incident["plan"]) == ("none", None)
    assert 1001 <= incident["onset_step"] <= 1003
    assert incident["alerts"] == ["TrainingWeightsApart"]
    named = drifting if len(drifting) < 4 else []  # most must agree for the others to be named
    assert incident["scope"]["ranks"] == named
    assert incident["scope"]["hosts"] == [EIGHT[rank] for rank in named]
    assert "normalisation layers" in " ".join(one["says"] for one in incident["evidence"])
    assert incident["cheapest_test"]


@case("D01")
def test_d01_of_two_ranks_that_part_none_is_named() -> None:
    (incident,) = judge_ranks(Ranks(1, 1200, layer_norms({1: 1e-5}), ["h0", "h1"])).told
    assert (incident["cause"]["name"], incident["scope"]["ranks"]) == ("distributed", [])


@case("D01")
def test_d01_the_exporters_own_weights_of_the_norms_tell_it_too() -> None:
    found = judge_ranks(Ranks(1, 1200, layer_norms({2: 1e-5}, name="weight_rms", level=0.9), EIGHT[:4]))
    (incident,) = found.told
    assert (incident["cause"]["name"], incident["severity"]) == ("distributed", "warning")
    assert incident["scope"]["ranks"] == [2]


@case("D01")
@pytest.mark.parametrize("apart", [0.0, 1e-7, 0.1])
def test_d01_weights_that_stay_equal_or_were_never_equal_are_nothing(apart: float) -> None:
    well = healthy()

    def make(step: int, rank: int, chance: np.random.Generator) -> Row:
        noise = 1 + 1e-8 * float(chance.normal())
        return well(step, rank, chance) | {"ln_weight_norm": 32.0 * (1 + apart * rank) * noise}

    assert judge_ranks(Ranks(1, 800, make, EIGHT)).told == []


def shards(world: int, upgraded_at: int, upgraded: bool) -> OfRank:
    """Each rank logs the norm of its own shard until a library is changed, and that of the whole gradient then."""
    well = healthy(norm=1.0)

    def make(step: int, rank: int, chance: np.random.Generator) -> Row:
        row = well(step, rank, chance)
        if step < upgraded_at or not upgraded:
            row["grad_norm"] *= (1 + 0.05 * float(chance.normal())) / math.sqrt(world)
        return row

    return make


def scopes(found: Verdicts) -> list[tuple[str | None, int]]:
    return [(one["signal"], one["step"]) for one in found.notices if one["kind"] == "metric_scope"]


@case("D05")
@pytest.mark.parametrize("world", [2, 4, 16, 64])
def test_d05_norms_of_shards_that_become_one_norm_at_an_upgrade_are_a_notice_and_no_spike(world: int) -> None:
    hosts = ["h0"] * world
    found = judge_ranks(Ranks(1, 900, shards(world, 601, True), hosts))
    assert found.told == []
    assert scopes(found)[0] == ("grad_norm", 1)
    assert ("grad_norm", 601) in scopes(found)


@case("D05")
@pytest.mark.parametrize("world", [4, 64])
def test_d05_the_same_over_a_restart_is_a_change_of_the_metric_too(world: int) -> None:
    hosts = ["h0"] * world
    before = Ranks(1, 600, shards(world, 601, True), hosts)
    after = Ranks(601, 1000, shards(world, 601, True), hosts, said={"torch": "2.6.0"})
    found = judge_ranks(before, after)
    assert found.told == []
    assert scopes(found)[0] == ("grad_norm", 1)
    (changed,) = [one for one in found.notices if one["kind"] == "metric_scope" and one["attempt"] == 1]
    assert (changed["signal"], changed["step"]) == ("grad_norm", 601)
    assert "another measure" in changed["says"]


@case("D05")
def test_d05_a_gradient_that_really_grows_behind_the_upgrade_is_told() -> None:
    well = shards(4, 601, True)

    def make(step: int, rank: int, chance: np.random.Generator) -> Row:
        row = well(step, rank, chance)
        return row | {"grad_norm": 12.0 * row["grad_norm"]} if 1150 <= step < 1160 else row

    found = judge_ranks(Ranks(1, 1300, make, ["h0"] * 4))
    assert [one["alerts"][0] for one in found.told] == ["TrainingGradNormSurge"]
    assert found.told[0]["onset_step"] == 1150
