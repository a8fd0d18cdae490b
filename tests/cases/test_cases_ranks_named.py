"""One rank among several: fed junk, fed another's samples, drifted apart, reduced wrongly; named by the incident, and nobody else."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from tests.cases.build import Row
from tests.cases.build_ranks import OfRank, Ranks, judge_ranks
from trainwarden.record import RankStats

FOUR = ["h0", "h1", "h2", "h3"]


def run_of(loss: float = 2.5, **more: Any) -> OfRank:
    """Ranks with losses of their own, gradients of their own before the reduction, equal parameters, batches that differ."""

    def make(step: int, rank: int, chance: np.random.Generator) -> Row:
        shared = np.random.default_rng((7, step))
        own = loss - 2e-4 * step + 0.08 * float(chance.normal())
        row: Row = {
            "loss": own,
            "rank_loss": own,
            "rank_grad_norm": 0.8 * float(chance.lognormal(0, 0.15)),
            "grad_norm": 0.45 * float(shared.lognormal(0, 0.08)),
            "batch_rows_hash": float(chance.integers(0, 2**32)),
            "batch_longest_repeat_tokens": float(chance.integers(2, 5)),
            "batch_unique_token_ratio": float(chance.normal(0.4, 0.01)),
            "rank_compute_seconds": float(chance.lognormal(-2, 0.2)),
        }
        if step % 10 == 0:
            row["param_hash"] = float(shared.integers(0, 2**32))
        return row

    return make


def changed(at: int, rank: int, change: Any, until: int = 10_000) -> OfRank:
    well = run_of()

    def make(step: int, own: int, chance: np.random.Generator) -> Row:
        row = well(step, own, chance)
        return change(row, step, chance) if own == rank and at <= step < until else row

    return make


def says(incident: dict[str, Any]) -> str:
    return " ".join(one["says"] for one in incident["evidence"])


@pytest.mark.parametrize("onset", [40, 200, 411])
@pytest.mark.parametrize("rank", [0, 2])
def test_a_rank_that_is_fed_junk_is_named_at_its_second_step(onset: int, rank: int) -> None:
    def junk(row: Row, step: int, chance: np.random.Generator) -> Row:
        row["loss"] = row["rank_loss"] = 6.0 + 0.1 * float(chance.normal())
        return row | {"batch_longest_repeat_tokens": 33.0, "batch_unique_token_ratio": 0.02, "rank_grad_norm": 2.0}

    found = judge_ranks(Ranks(1, onset + 100, changed(onset, rank, junk), FOUR))
    incident = next(one for one in found.incidents if "TrainingRankApart" in one["alerts"])
    assert incident["opened_step"] - incident["onset_step"] <= 2
    assert incident["onset_step"] == onset
    assert (incident["scope"]["ranks"], incident["scope"]["hosts"]) == ([rank], [FOUR[rank]])
    assert incident["cause"]["name"] == "data"
    assert "33 against" in says(incident)


def test_one_step_of_junk_on_one_rank_is_not_told() -> None:
    def junk(row: Row, step: int, chance: np.random.Generator) -> Row:
        row["loss"] = row["rank_loss"] = 6.0
        return row

    found = judge_ranks(Ranks(1, 400, changed(200, 2, junk, until=201), FOUR))
    assert not any("TrainingRankApart" in one["alerts"] for one in found.incidents)


def test_where_a_batch_looks_as_usual_data_and_hardware_are_not_told_apart() -> None:
    def off(row: Row, step: int, chance: np.random.Generator) -> Row:
        row["loss"] = row["rank_loss"] = 5.0
        return row

    found = judge_ranks(Ranks(1, 260, changed(200, 3, off), FOUR))
    incident = next(one for one in found.incidents if "TrainingRankApart" in one["alerts"])
    assert incident["scope"]["ranks"] == [3]
    assert incident["cause"]["name"] == "undetermined"
    assert {"data", "hardware"} <= set(incident["cause"]["scores"])
    assert "parameters were still those of the others" in says(incident)


def test_two_ranks_that_read_the_same_are_both_named_whatever_the_order_of_the_samples() -> None:
    well = run_of()

    def make(step: int, rank: int, chance: np.random.Generator) -> Row:
        row = well(step, rank, chance)
        if step >= 120 and rank in (1, 2):
            row["batch_rows_hash"] = float(5000 + step)
        return row

    (incident,) = judge_ranks(Ranks(1, 200, make, FOUR)).told
    assert (incident["onset_step"], incident["opened_step"]) == (120, 121)
    assert incident["scope"]["ranks"] == [1, 2]
    assert (incident["verdict"], incident["cause"]["name"], incident["severity"]) == ("mismatch", "data", "warning")
    assert "Ranks 1 and 2" in says(incident) or "Ranks 1, 2" in says(incident)


@pytest.mark.parametrize("groups", [[0, 0, 1, 1], [0, 0, 0, 0]])
def test_ranks_that_a_model_is_split_over_read_one_batch_by_design(groups: list[int]) -> None:
    well = run_of()

    def make(step: int, rank: int, chance: np.random.Generator) -> Row:
        return well(step, rank, chance) | {"batch_rows_hash": float(1000 * groups[rank] + step)}

    assert judge_ranks(Ranks(1, 200, make, FOUR)).told == []


def test_a_replica_that_drifts_apart_is_named_at_the_first_hash() -> None:
    def drift(row: Row, step: int, chance: np.random.Generator) -> Row:
        return row | {"param_hash": row["param_hash"] + 1.0} if "param_hash" in row else row  # type: ignore[operator]

    found = judge_ranks(Ranks(1, 300, changed(143, 3, drift), FOUR))
    (incident,) = found.told
    assert (incident["onset_step"], incident["opened_step"]) == (150, 150)
    assert (incident["verdict"], incident["severity"], incident["cause"]["name"]) == (
        "mismatch",
        "critical",
        "distributed",
    )
    assert incident["cause"]["scores"]["hardware"] > 0
    assert (incident["scope"]["ranks"], incident["scope"]["hosts"]) == ([3], ["h3"])
    assert "no longer train one model" in says(incident)
    assert "tensor by tensor" in incident["cheapest_test"]


def test_of_two_replicas_that_part_none_is_named() -> None:
    def drift(row: Row, step: int, chance: np.random.Generator) -> Row:
        return row | {"param_hash": 1.0} if "param_hash" in row else row

    (incident,) = judge_ranks(Ranks(1, 300, changed(143, 1, drift), ["h0", "h1"])).told
    assert incident["verdict"] == "mismatch"
    assert incident["scope"]["ranks"] == []


def test_parameters_that_were_never_equal_are_no_replicas() -> None:
    well = run_of()

    def make(step: int, rank: int, chance: np.random.Generator) -> Row:
        row = well(step, rank, chance)
        return row | {"param_hash": float(10_000 * rank + step)} if "param_hash" in row else row

    assert judge_ranks(Ranks(1, 300, make, FOUR)).told == []


def test_where_rank_0s_records_alone_are_read_drift_is_seen_and_nobody_named() -> None:
    well = run_of()
    one = Ranks(1, 200, well, ["h0"])
    lines = one.lines(0, 1e9)
    for _, _, record in lines:
        if getattr(record, "step", 0) % 10 == 0 and hasattr(record, "ranks"):
            low = record.signals["param_hash"]
            assert isinstance(low, float)
            high = low + 5.0 if record.step >= 150 else low
            record.ranks["param_hash"] = RankStats(min=low, max=high, sum=0.0, argmax=2, n=4)
    from tests.cases.build import Verdicts, pack
    from trainwarden.rules.core.settings import Settings
    from trainwarden.rules.replay.driver import Replay

    replay = Replay(Settings(), pack()).run(lines)
    found = Verdicts(list(replay.incidents.values()), list(replay.notices.values()))
    (incident,) = found.told
    assert (incident["verdict"], incident["onset_step"], incident["scope"]["ranks"]) == ("mismatch", 150, [])


def test_a_reduction_that_returns_a_tenth_is_told_and_the_data_is_not_blamed() -> None:
    well = run_of()

    def make(step: int, rank: int, chance: np.random.Generator) -> Row:
        row = well(step, rank, chance)
        return row | {"grad_norm": row["grad_norm"] * 0.02} if step >= 200 else row  # type: ignore[operator]

    found = judge_ranks(Ranks(1, 260, make, FOUR))
    incident = next(one for one in found.told if "TrainingReductionOff" in one["alerts"])
    assert (incident["onset_step"], incident["verdict"]) == (200, "mismatch")
    assert incident["cause"]["name"] == "distributed"


def test_a_nan_in_one_ranks_own_gradient_names_it_although_all_ranks_get_it_at_once() -> None:
    well = run_of()

    def make(step: int, rank: int, chance: np.random.Generator) -> Row:
        row = well(step, rank, chance)
        if step >= 200:
            row["grad_norm"] = float("nan")
            if rank == 1 and step == 200:
                row["rank_grad_norm"] = float("nan")
        return row | {"loss": float("nan"), "rank_loss": float("nan")} if step > 200 else row

    found = judge_ranks(Ranks(1, 220, make, FOUR))
    incident = found.told[0]
    assert (incident["onset_step"], incident["verdict"]) == (200, "nonfinite")
    assert incident["scope"]["ranks"] == [1]


@pytest.mark.parametrize("seed", range(4))
def test_healthy_ranks_are_told_of_by_nobody(seed: int) -> None:
    found = judge_ranks(Ranks(1, 800, run_of(), FOUR, seed=seed))
    assert found.told == []
    assert [one for one in found.incidents if set(one["alerts"]) & {"TrainingRankApart", "TrainingSlowRank"}] == []


def test_ranks_with_heavy_tails_are_told_of_by_nobody() -> None:
    well = run_of()

    def make(step: int, rank: int, chance: np.random.Generator) -> Row:
        row = well(step, rank, chance)
        row["loss"] = row["rank_loss"] = 2.5 + 0.1 * float(np.clip(chance.standard_t(3), -5, 15))
        return row

    found = judge_ranks(Ranks(1, 1200, make, FOUR))
    assert not any("TrainingRankApart" in one["alerts"] for one in found.incidents)
