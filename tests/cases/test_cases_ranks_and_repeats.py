"""Cases that are told by ranks, hosts and what a second attempt repeats: one rank or all, the same step or the same time."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest

from tests.cases.build import Row
from tests.cases.build_ranks import OfRank, Ranks, broken_from, healthy, judge_ranks
from tests.cases.registry import case

EIGHT = [f"h{number}" for number in range(8)]


def says(incident: dict[str, Any]) -> str:
    return " ".join(one["says"] for one in incident["evidence"])


@case("A22")
def test_a22_ranks_that_read_the_same_samples_are_a_warning() -> None:
    def make(step: int, rank: int, chance: np.random.Generator) -> Row:
        shared = np.random.default_rng((3, step))
        own = 2.3 + 0.1 * float(shared.normal()) + 1e-7 * float(chance.normal())
        return {"loss": own, "rank_loss": own, "grad_norm": 0.4 + 0.02 * float(shared.normal())}

    found = judge_ranks(Ranks(1, 300, make, ["h0"] * 4))
    (incident,) = found.told
    assert incident["severity"] == "warning"
    assert incident["alerts"] == ["TrainingDuplicateRanks"]
    assert incident["opened_step"] <= 60
    assert incident["cause"]["name"] == "distributed"
    assert incident["cause"]["scores"]["data"] > 0
    assert "same samples" in says(incident)


@case("A22")
def test_a22_ranks_with_samples_of_their_own_are_none() -> None:
    assert judge_ranks(Ranks(1, 400, healthy(sd=0.1), ["h0"] * 4)).told == []


@case("A22")
def test_a22_a_rounded_loss_that_ranks_share_now_and_then_is_none() -> None:
    def make(step: int, rank: int, chance: np.random.Generator) -> Row:
        own = round(2.3 + 0.004 * float(chance.normal()), 2)
        return {"loss": own, "rank_loss": own}

    assert judge_ranks(Ranks(1, 600, make, ["h0"] * 2)).told == []


@case("A22")
def test_a22_behind_a_resume_does_not_say_that_the_resume_was_wrong() -> None:
    def make(step: int, rank: int, chance: np.random.Generator) -> Row:
        own = math.nan if step >= 600 else 2.3 + 0.1 * float(np.random.default_rng((3, step)).normal())
        return {"loss": own, "rank_loss": own}

    found = judge_ranks(Ranks(1, 400, make, ["h0"] * 4, checkpoints=(200, 400)), Ranks(401, 640, make, ["h0"] * 4))
    last = found.pages[-1]
    assert last["verdict"] == "nonfinite"
    assert last["action"] == "rollback"


@case("A25")
def test_a25_one_rank_whose_reduced_norm_differs_is_named() -> None:
    well = healthy()

    def make(step: int, rank: int, chance: np.random.Generator) -> Row:
        row = well(step, rank, chance)
        if step >= 500 and rank == 5:
            row["grad_norm"] *= 1.003
        return row

    found = judge_ranks(Ranks(1, 700, make, EIGHT))
    (incident,) = found.told
    assert incident["verdict"] == "mismatch"
    assert incident["severity"] == "critical"
    assert incident["onset_step"] == 500
    assert incident["cause"]["name"] == "distributed"
    assert incident["scope"]["ranks"] == [5]
    assert incident["scope"]["hosts"] == ["h5"]
    assert incident["action"] == "escalate"
    assert "checksum" in incident["cheapest_test"]


@case("A25")
def test_a25_of_two_ranks_that_went_apart_none_is_named() -> None:
    well = healthy()

    def make(step: int, rank: int, chance: np.random.Generator) -> Row:
        row = well(step, rank, chance)
        return row | {"grad_norm": row["grad_norm"] * (1.003 if step >= 500 and rank else 1.0)}

    (incident,) = judge_ranks(Ranks(1, 700, make, ["h0", "h1"])).told
    assert incident["cause"]["name"] == "distributed"
    assert incident["scope"]["ranks"] == []


@case("D05")
def test_d05_norms_of_shards_are_a_notice_and_no_incident() -> None:
    well = healthy()

    def make(step: int, rank: int, chance: np.random.Generator) -> Row:
        row = well(step, rank, chance)
        return row | {"grad_norm": row["grad_norm"] / 2 * (1 + 0.05 * float(chance.normal()))}

    found = judge_ranks(Ranks(1, 400, make, ["h0"] * 4))
    assert found.told == []
    (notice,) = [one for one in found.notices if one["kind"] == "metric_scope"]
    assert (notice["signal"], notice["step"]) == ("grad_norm", 1)


@case("A24")
def test_a24_the_same_host_in_two_attempts_with_other_data_is_hardware_and_the_plan_leaves_it_out() -> None:
    moved = [*EIGHT[1:], EIGHT[0]]  # rank 6 is on h7 now
    found = judge_ranks(
        Ranks(1, 420, broken_from(400, 7), EIGHT, samples=4, checkpoints=(100, 200, 300)),
        Ranks(301, 640, broken_from(620, 6), moved, seed=1, samples=4, checkpoints=(500, 600)),
    )
    first, second = found.pages
    assert first["scope"] == {"ranks": [7], "groups": [], "modules": [], "hosts": ["h7"]}
    assert "swap" in first["cheapest_test"]
    assert second["scope"]["ranks"] == [6]
    assert second["scope"]["hosts"] == ["h7"]
    assert second["cause"]["name"] == "hardware"
    assert second["action"] == "rollback"
    assert second["summary"].startswith("Nonfinite from step 620 on rank 6 (h7), ")
    assert second["plan"]["exclude_hosts"] == ["h7"]
    assert second["plan"]["skip_samples"] == []
    assert second["plan"]["reset_optimizer"] is False
    assert second["plan"]["target"]["step"] == 600


@case("A24")
def test_a24_other_hosts_and_other_steps_prove_nothing() -> None:
    found = judge_ranks(
        Ranks(1, 420, broken_from(400, 7), EIGHT, samples=4, checkpoints=(300,)),
        Ranks(301, 640, broken_from(620, 2), EIGHT, seed=1, samples=4, checkpoints=(600,)),
    )
    second = found.pages[1]
    assert second["scope"]["hosts"] == ["h2"]
    assert second["cause"]["name"] == "undetermined"
    assert second["plan"] is None or second["plan"]["exclude_hosts"] == []
    assert "too" not in says(second)


@case("A24")
def test_a24_the_only_host_there_is_is_not_suspect() -> None:
    found = judge_ranks(
        Ranks(1, 420, broken_from(400, 1), ["h0"] * 4, samples=4, checkpoints=(300,)),
        Ranks(301, 640, broken_from(620, 2), ["h0"] * 4, seed=1, samples=4, checkpoints=(600,)),
    )
    second = found.pages[1]
    assert second["cause"]["name"] != "hardware"
    assert second["plan"] is None or second["plan"]["exclude_hosts"] == []


def nan_from(step: int, loss: float = 2.3) -> OfRank:
    well = healthy(loss)

    def make(at: int, rank: int, chance: np.random.Generator) -> Row:
        row = well(at, rank, chance)
        return row if at < step else row | {"loss": math.nan, "rank_loss": math.nan, "grad_norm": math.nan}

    return make


FP8 = {"precision": "fp8", "torch": "2.6.0", "nccl": "2.25.1", "transformer_engine": "2.0"}


@case("A35")
@pytest.mark.parametrize("seed", [0, 1])
def test_a35_a_nan_at_the_same_step_in_narrow_numbers_is_the_kernel_first_and_no_rollback_is_made(seed: int) -> None:
    found = judge_ranks(
        Ranks(1, 320, nan_from(280), said=FP8, checkpoints=(100, 200)),
        Ranks(201, 320, nan_from(280), said=FP8, seed=seed),
    )
    second = found.pages[1]
    scores = second["cause"]["scores"]
    assert second["cause"]["name"] == "numeric"
    assert 0 < scores["data"] < scores["numeric"]
    assert second["action"] == "escalate"
    assert second["plan"] is None
    assert "another precision" in second["cheapest_test"]
    assert "another precision" in second["timeline"][-1]["says"]
    assert "precision fp8" in says(second)
    assert "nccl 2.25.1" in says(second)


@case("E05")
def test_e05_the_same_time_since_the_start_is_the_process_and_is_not_tried_again() -> None:
    found = judge_ranks(
        Ranks(1, 720, nan_from(700), checkpoints=(400,)),
        Ranks(401, 1120, nan_from(1100), checkpoints=(800,), samples=8),
        Ranks(801, 1520, nan_from(1500), samples=8),
    )
    assert [one["action"] for one in found.pages] == ["rollback", "escalate", "escalate"]
    third = found.pages[2]
    assert "steps after its start" in says(third)
    assert third["cause"]["scores"].get("data", 0.0) < 0.1
    assert "as many steps" in third["cheapest_test"]


@case("E05")
def test_e05_the_same_step_again_points_to_the_data_and_is_not_tried_again() -> None:
    found = judge_ranks(
        Ranks(1, 720, nan_from(700), checkpoints=(400, 600)),
        Ranks(401, 720, nan_from(700), checkpoints=(600,)),
        Ranks(601, 720, nan_from(700)),
    )
    third = found.pages[2]
    assert third["action"] == "escalate"
    assert third["cause"]["scores"]["data"] > 0.4
    assert "broke at step 700 too" in says(third)


def test_two_attempts_that_break_at_other_steps_and_ages_prove_nothing() -> None:
    found = judge_ranks(
        Ranks(1, 720, nan_from(700), checkpoints=(400,)),
        Ranks(401, 1620, nan_from(1600), seed=1, checkpoints=(1200,)),
    )
    second = found.pages[1]
    assert second["action"] == "rollback"
    assert not {one["kind"] for one in second["evidence"]} & {"repeated_step", "repeated_nearby", "repeated_age"}


def of_a03(breaks: int) -> OfRank:
    """104B fp16: flat at 6.4, up within forty steps, a loss scale that has been falling since step 4700."""
    climb = (6.44, 6.60, 7.31, 9.12, 10.24)

    def make(step: int, rank: int, chance: np.random.Generator) -> Row:
        loss = 6.4 + 0.04 * float(chance.normal())
        if step >= breaks:
            loss += climb[min((step - breaks) // 10, 4)] - 6.4
        halvings = max(0, step - 4700) // 450
        return {"loss": loss, "lr": 6e-5 * min(1.0, step / 7000), "loss_scale": 65536.0 / 2**halvings}

    return make


@case("A03")
def test_a03_another_order_of_the_data_breaks_nearby_and_a_person_takes_over() -> None:
    found = judge_ranks(
        Ranks(10, 7400, of_a03(7000), stride=10, checkpoints=(3000, 6210)),
        Ranks(6220, 7200, of_a03(6900), stride=10, seed=1),
    )
    first, second = found.pages[0], found.pages[-1]
    assert first["action"] == "rollback"
    assert first["plan"]["target"]["step"] == 3000
    assert second["attempt"] == 1
    assert second["action"] == "escalate"
    assert second["plan"] is None
    assert second["cause"]["name"] in ("learning_rate", "model")
    assert second["cause"]["scores"].get("data", 0.0) < 0.2
    assert "no batch does that" in says(second)


def spiking(at: int) -> OfRank:
    well = healthy()

    def make(step: int, rank: int, chance: np.random.Generator) -> Row:
        row = well(step, rank, chance)
        if at <= step < at + 5:
            row["loss"] += 3.0 * 0.5 ** (step - at)
            row["rank_loss"] = row["loss"]
            row["grad_norm"] *= 50 if step == at else 5
        return row

    return make


@case("A38")
@pytest.mark.parametrize("samples", [0, 16])
def test_a38_the_same_data_without_a_spike_clears_the_data_and_suspects_the_machine(samples: int) -> None:
    found = judge_ranks(
        Ranks(4400, 5040, spiking(5000), samples=samples),
        Ranks(4901, 5200, healthy(), samples=samples),
    )
    (incident,) = found.told
    assert incident["verdict"] == "transient_spike"
    assert incident["cause"]["name"] == "hardware"
    assert incident["cause"]["confidence"] < 0.9
    assert incident["cause"]["scores"].get("data", 0.0) < 0.1
    assert incident["suspect_samples"] == []
    assert incident["state"] == "recovered"
    assert "passed" in says(incident)


@case("A38")
def test_a38_behind_a_rollback_the_machine_is_suspect_and_the_verification_goes_on() -> None:
    target = {"attempt": 0, "step": 4900, "path": "ckpt"}
    plan = {"plan_id": "plan_x", "start_step": 4901, "target": target}
    (incident,) = judge_ranks(
        Ranks(4400, 5040, spiking(5000), samples=16),
        Ranks(4901, 5400, healthy(), samples=16, said={"plan_applied": plan}),
    ).told
    assert incident["cause"]["name"] == "hardware"
    assert incident["verdict"] == "transient_spike"
    assert incident["state"] == "recovered"
    assert incident["verification"]["windows"][2]["says"]


@case("A38")
def test_a38_a_plan_that_resets_the_optimizer_does_not_repeat_the_experiment() -> None:
    target = {"attempt": 0, "step": 4900, "path": "ckpt"}
    plan = {"plan_id": "plan_x", "start_step": 4901, "target": target, "reset_optimizer": True}
    found = judge_ranks(
        Ranks(4400, 5040, spiking(5000), samples=16),
        Ranks(4901, 5400, healthy(), samples=16, said={"plan_applied": plan}),
    )
    assert found.told[0]["cause"]["name"] != "hardware"


@case("A38")
def test_a38_other_data_without_a_spike_says_nothing() -> None:
    found = judge_ranks(Ranks(4400, 5040, spiking(5000)), Ranks(4901, 5200, healthy(), seed=1))
    (incident,) = found.told
    assert incident["cause"]["name"] != "hardware"
    assert "passed" not in says(incident)


@case("A38")
def test_a38_the_same_data_with_the_same_spike_is_no_fault_of_the_machine() -> None:
    found = judge_ranks(Ranks(4400, 5040, spiking(5000)), Ranks(4901, 5200, spiking(5000)))
    assert all(one["cause"]["name"] != "hardware" for one in found.told)
    assert "broke at step" in says(found.told[-1])


RACKS = [f"rack{number // 4}" for number in range(32)]
HOSTS = [f"n{number:02d}" for number in range(32)]


def fabric(first: int, seed: int) -> list[tuple[int, float, dict[str, Any]]]:
    """Errors 900 s into a silent stall: four nodes of one rack within half a second, all others within seven; skewed clocks."""
    chance = np.random.default_rng(seed)
    found = []
    for rank in range(32):
        near = rank // 4 == first // 4
        after = 0.0 if rank == first else float(chance.uniform(0.1, 0.4)) if near else float(chance.uniform(2.0, 7.0))
        skew = float(chance.uniform(-0.3, 0.3))
        found.append((rank, round(900 + after + skew, 3), {"message": "NCCL error: remote process exited"}))
    return found


@case("A33")
def test_a33_the_first_failures_are_named_within_the_clocks_and_the_same_rack_again_is_hardware() -> None:
    run = {"make": healthy(), "hosts": HOSTS, "domains": RACKS}
    found = judge_ranks(
        Ranks(65000, 65069, failures=fabric(13, 0), **run),  # type: ignore[arg-type]
        Ranks(64945, 65030, failures=fabric(14, 5), **run),  # type: ignore[arg-type]
    )
    first, second = (one for one in found.incidents if "TrainingFailed" in one["alerts"])
    assert set(first["scope"]["hosts"]) <= {"n12", "n13", "n14", "n15"}
    assert "n13" in first["scope"]["hosts"]
    assert "300 ms" in says(first)
    assert first["cause"]["name"] == "undetermined"
    assert "n14" in second["scope"]["hosts"]
    assert second["cause"]["name"] == "hardware"
    assert "rack3" in says(second)
    assert second["severity"] == "critical"
    assert not {"data", "learning_rate"} & set(second["cause"]["scores"])


@case("A33")
def test_a33_a_failure_by_more_than_the_clocks_differ_is_one_hosts() -> None:
    failures = [(rank, 900 + (0.0 if rank == 9 else 1.0 + rank / 10), {}) for rank in range(32)]
    found = judge_ranks(Ranks(65000, 65069, healthy(), HOSTS, failures=failures))
    (incident,) = (one for one in found.incidents if "TrainingFailed" in one["alerts"])
    assert incident["scope"]["hosts"] == ["n09"]
    assert "by more than clocks are off" in says(incident)
    assert "self-test" in incident["cheapest_test"]


@case("A33")
def test_a33_failures_without_a_single_record_are_told_all_the_same() -> None:
    found = judge_ranks(Ranks(1, 0, healthy(), HOSTS, domains=RACKS, failures=fabric(13, 0)))
    (incident,) = found.told
    assert "n13" in incident["scope"]["hosts"]


@case("A24")
def test_a24_a_loss_that_one_rank_alone_has_lost_is_found_where_the_first_rank_sees_nothing() -> None:
    well = healthy()

    def make(step: int, rank: int, chance: np.random.Generator) -> Row:
        row = well(step, rank, chance)
        return row | {"loss": math.nan, "rank_loss": math.nan} if step >= 300 and rank == 3 else row

    (incident,) = judge_ranks(Ranks(1, 400, make, EIGHT, checkpoints=(200,))).told
    assert (incident["onset_step"], incident["verdict"], incident["severity"]) == (300, "nonfinite", "critical")
    assert incident["scope"]["ranks"] == [3]
    assert incident["action"] == "rollback"
    assert incident["held_by"] == "approval"


@case("A24")
def test_a24_where_the_same_device_of_the_only_host_breaks_again_a_person_must_exchange_it() -> None:
    found = judge_ranks(
        Ranks(1, 420, broken_from(400, 5), ["h0"] * 8, samples=4, checkpoints=(300,)),
        Ranks(301, 640, broken_from(620, 5), ["h0"] * 8, seed=1, samples=4, checkpoints=(600,)),
    )
    second = found.pages[1]
    assert second["cause"]["name"] == "hardware"
    assert second["action"] == "escalate"
    assert "no other host" in second["timeline"][-1]["says"]
