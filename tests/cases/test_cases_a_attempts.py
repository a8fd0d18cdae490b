"""Cases of category a that several attempts, ranks or hosts tell, as journals that the public command replays."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.cases.build import Row, lines_of, rows
from tests.cases.build_files import journal, replayed
from tests.cases.build_ranks import OfRank, Ranks, broken_from, healthy, lines_of_ranks
from tests.cases.registry import case

SEEDS = (0, 1, 2)


def says(incident: dict[str, Any]) -> str:
    return " ".join(one["says"] for one in incident["evidence"])


def checkpoint(step: int, attempt: int) -> tuple[int, str, dict[str, Any]]:
    return step, "checkpoint", {"path": f"c{attempt}-{step}", "complete": True, "finite": True}


def of_a03(seed: int, first: int, breaks: int, last: int, warmup: int = 7000) -> list[tuple[int, Row]]:
    """104B fp16: flat at 6.4, up within forty steps near the top of the warm-up, a loss scale that falls from step 4700 on.

    The gradient norm still carries the loss scale, as that log had it.
    """
    climb = (6.445, 6.598, 7.314, 9.122, 10.239, 11.42)

    def make(step: int, chance: np.random.Generator) -> Row:
        loss = 6.4 + 0.04 * float(chance.normal())
        if step >= breaks:
            loss += climb[min((step - breaks) // 10, 5)] - 6.4
        scale = 65536.0 / 2 ** (max(0, step - 4700) // 450)
        norm = 24.0 * scale * math.exp(0.15 * float(chance.normal())) * (2.5 if step >= breaks + 10 else 1.0)
        return {"loss": loss, "grad_norm": norm, "lr": 6e-5 * min(1.0, step / warmup), "loss_scale": scale}

    return rows(first, last, make, stride=10, seed=seed)


def applied(number: int, target: int) -> dict[str, Any]:
    """The start event of an attempt that was rolled back to ``target`` by a plan."""
    place = {"attempt": 0, "step": target, "path": f"c0-{target}"}
    return {
        "plan_applied": {"plan_id": f"plan_{number}", "start_step": target + 1, "target": place},
        "resumed_from": place,
    }


@case("A03")
@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("planned", [False, True])
def test_a03_another_order_of_the_data_breaks_nearby_and_a_person_takes_over(
    tmp_path: Path, seed: int, planned: bool
) -> None:
    made = lines_of(
        of_a03(seed, 10, 7000, 7400),
        of_a03(seed + 10, 3010 if planned else 6220, 6900, 7200),
        stride=10,
        changes=[checkpoint(3000, 0), checkpoint(6210, 0)],
        said={1: applied(1, 3000)} if planned else {},
    )
    found = replayed(journal(tmp_path / "run", made))
    first = next(one for one in found.pages if one["attempt"] == 0)
    assert (first["action"], first["verdict"]) in [("rollback", "divergence"), ("rollback", "level_shift")]
    assert first["plan"]["target"]["step"] == 3000  # the scale has been falling since 4700: 6210 was bad already
    assert 6990 <= first["onset_step"] <= 7010
    assert first["cause"]["name"] != "data"
    second = [one for one in found.pages if one["attempt"] == 1][-1]
    assert (second["action"], second["state"], second["plan"]) == ("escalate", "escalated", None)
    assert 6890 <= second["onset_step"] <= 6920
    assert second["cause"]["name"] in ("learning_rate", "model")
    assert second["cause"]["scores"].get("data", 0.0) < 0.2


@case("A03")
@pytest.mark.parametrize("seed", SEEDS)
def test_a03_where_each_rollback_fails_elsewhere_the_third_is_not_made(tmp_path: Path, seed: int) -> None:
    """Two rollbacks were made and failed far apart, so that nothing repeats: their number alone is enough."""
    made = lines_of(
        of_a03(seed, 10, 7000, 7400),
        of_a03(seed + 10, 3010, 5200, 5600),
        of_a03(seed + 20, 3010, 9000, 9400),
        stride=10,
        changes=[checkpoint(1500, 0), checkpoint(3000, 0)],
        said={1: applied(1, 3000), 2: applied(2, 3000)},
    )
    found = replayed(journal(tmp_path / "run", made))
    last = [one for one in found.pages if one["attempt"] == 2]
    assert last
    assert {one["action"] for one in last} == {"escalate"}
    assert {one["state"] for one in last} == {"escalated"}


@case("A03")
@pytest.mark.parametrize("seed", SEEDS)
def test_a03_a_norm_that_carries_the_loss_scale_is_no_fault_where_the_scale_moves(seed: int, tmp_path: Path) -> None:
    def make(step: int, chance: np.random.Generator) -> Row:
        scale = 65536.0 / 4 ** (step // 900)
        norm = 24.0 * scale * math.exp(0.15 * float(chance.normal()))
        return {"loss": 6.4 + 0.04 * float(chance.normal()), "grad_norm": norm, "lr": 6e-5, "loss_scale": scale}

    made = lines_of(rows(1, 2600, make, seed=seed))
    assert replayed(journal(tmp_path / "run", made)).told == []


@case("A24")
@pytest.mark.parametrize(
    ("ranks", "one", "other", "steps"), [(8, 7, 6, (400, 620)), (16, 3, 3, (222, 901)), (12, 0, 11, (610, 350))]
)
def test_a24_the_host_on_which_it_began_twice_with_other_data_is_left_out(
    tmp_path: Path, ranks: int, one: int, other: int, steps: tuple[int, int]
) -> None:
    hosts = [f"h{number}" for number in range(ranks)]
    bad = f"h{one}"
    moved = [name for name in hosts if name != bad]
    moved.insert(other, bad)
    made = lines_of_ranks(
        Ranks(1, steps[0] + 20, broken_from(steps[0], one), hosts, samples=4, checkpoints=(100, 200)),
        Ranks(201, steps[1] + 20, broken_from(steps[1], other), moved, seed=1, samples=4, checkpoints=(300,)),
    )
    first, second = replayed(journal(tmp_path / "run", made)).pages
    assert (first["scope"]["ranks"], first["scope"]["hosts"]) == ([one], [bad])
    assert first["cause"]["name"] != "hardware"  # once proves nothing
    assert "swap" in first["cheapest_test"]
    assert (second["scope"]["ranks"], second["scope"]["hosts"]) == ([other], [bad])
    assert (second["verdict"], second["severity"]) == ("nonfinite", "critical")
    assert second["cause"]["name"] == "hardware"
    assert second["action"] == "rollback"
    assert second["plan"]["exclude_hosts"] == [bad]
    assert second["plan"]["skip_samples"] == []
    assert second["plan"]["target"]["step"] == 300
    assert "swap" in second["cheapest_test"]


@case("A25")
@pytest.mark.parametrize(("ranks", "rank", "off", "at"), [(8, 5, 0.003, 500), (4, 0, 0.001, 333), (16, 9, -0.01, 720)])
def test_a25_the_rank_whose_reduced_norm_differs_is_named(
    tmp_path: Path, ranks: int, rank: int, off: float, at: int
) -> None:
    well = healthy()

    def make(step: int, own: int, chance: np.random.Generator) -> Row:
        row = well(step, own, chance)
        return row | {"grad_norm": row["grad_norm"] * (1 + off)} if step >= at and own == rank else row

    made = lines_of_ranks(Ranks(1, at + 200, make, [f"h{number}" for number in range(ranks)]))
    (incident,) = replayed(journal(tmp_path / "run", made)).told
    assert (incident["verdict"], incident["severity"]) == ("mismatch", "critical")
    assert incident["onset_step"] == at
    assert incident["cause"]["name"] == "distributed"
    assert (incident["scope"]["ranks"], incident["scope"]["hosts"]) == ([rank], [f"h{rank}"])
    assert (incident["action"], incident["plan"]) == ("escalate", None)


@case("A22")
@pytest.mark.parametrize(("ranks", "seed"), [(3, 0), (4, 1), (8, 2)])
def test_a22_ranks_with_one_loss_read_the_same_samples(tmp_path: Path, ranks: int, seed: int) -> None:
    def make(step: int, rank: int, chance: np.random.Generator) -> Row:
        shared = np.random.default_rng((3, seed, step))
        own = 2.4131 + 0.1 * float(shared.normal()) + 1e-7 * float(chance.normal())
        return {"loss": own, "rank_loss": own, "grad_norm": 0.4 + 0.02 * float(shared.normal())}

    made = lines_of_ranks(Ranks(1, 200, make, ["h0"] * ranks, seed=seed))
    (incident,) = replayed(journal(tmp_path / "same", made)).told
    assert (incident["verdict"], incident["severity"], incident["action"]) == ("mismatch", "warning", "none")
    assert incident["cause"]["name"] in ("data", "distributed")
    assert {"data", "distributed"} <= set(incident["cause"]["scores"])
    assert incident["opened_step"] <= 60
    control = lines_of_ranks(Ranks(1, 200, healthy(sd=0.1), ["h0"] * ranks, seed=seed))
    assert replayed(journal(tmp_path / "other", control)).told == []


def nan_from(step: int) -> OfRank:
    well = healthy()

    def make(at: int, rank: int, chance: np.random.Generator) -> Row:
        row = well(at, rank, chance)
        return row if at < step else row | {"loss": math.nan, "rank_loss": math.nan, "grad_norm": math.nan}

    return make


@case("A35")
@pytest.mark.parametrize(("precision", "at"), [("fp8", 80), ("fp8_rowwise", 280), ("float8_e4m3", 120)])
def test_a35_a_nan_at_the_same_step_is_the_kernel_first_and_no_third_rollback_is_made(
    tmp_path: Path, precision: str, at: int
) -> None:
    said = {"precision": precision, "torch": "2.6.0", "nccl": "2.25.1", "flash_attn": "2.0.4"}
    made = lines_of_ranks(
        Ranks(1, at + 40, nan_from(at), said=said, checkpoints=(at // 4, at // 2)),
        Ranks(at // 2 + 1, at + 40, nan_from(at), said=said),
        Ranks(at // 2 + 1, at + 40, nan_from(at), said=said),
    )
    pages = replayed(journal(tmp_path / "run", made)).pages
    assert [one["attempt"] for one in pages] == [0, 1, 2]
    for again in pages[1:]:
        scores = again["cause"]["scores"]
        assert again["cause"]["name"] == "numeric"
        assert max((name for name in scores if name != "numeric"), key=lambda name: scores[name]) == "data"
        assert (again["action"], again["plan"], again["state"]) == ("escalate", None, "escalated")
        assert "another precision" in again["cheapest_test"]
        for version in (f"precision {precision}", "torch 2.6.0", "nccl 2.25.1", "flash_attn 2.0.4"):
            assert version in says(again)


def spiking(at: int, times: float) -> OfRank:
    well = healthy()

    def make(step: int, rank: int, chance: np.random.Generator) -> Row:
        row = well(step, rank, chance)
        if at <= step < at + 5:
            row["loss"] += 3.0 * 0.5 ** (step - at)
            row["rank_loss"] = row["loss"]
            row["grad_norm"] *= times if step == at else 5
        return row

    return make


@case("A38")
@pytest.mark.parametrize(
    ("times", "planned", "samples"), [(50, False, 0), (50, True, 16), (20, False, 16), (400, True, 0)]
)
def test_a38_the_same_data_without_the_spike_clears_the_data_and_suspects_the_machine(
    tmp_path: Path, times: float, planned: bool, samples: int
) -> None:
    said = {"plan_applied": {**applied(1, 4900)["plan_applied"]}} if planned else {}
    made = lines_of_ranks(
        Ranks(4400, 5040, spiking(5000, times), samples=samples, checkpoints=(4800, 4900)),
        Ranks(4901, 5400, healthy(), samples=samples, said=said),
    )
    (incident,) = replayed(journal(tmp_path / "run", made)).told
    assert incident["verdict"] == "transient_spike"
    assert incident["cause"]["name"] == "hardware"
    assert 0.5 <= incident["cause"]["confidence"] < 0.9  # a probability, no certainty
    assert incident["cause"]["scores"].get("data", 0.0) < 0.1
    assert incident["suspect_samples"] == []
    assert incident["state"] == "recovered"
    assert incident["attempt"] == 0


RACKS = [f"rack{number // 4}" for number in range(32)]
HOSTS = [f"n{number:02d}" for number in range(32)]


def fabric(first: int, seed: int) -> list[tuple[int, float, dict[str, Any]]]:
    """Errors 900 s into a silent stall: four nodes of one rack within half a second, all others within seven; skewed clocks."""
    chance = np.random.default_rng(seed)
    found = []
    for rank in range(32):
        near = rank // 4 == first // 4
        after = 0.0 if rank == first else float(chance.uniform(0.1, 0.4)) if near else float(chance.uniform(2.0, 7.0))
        found.append((rank, round(900 + after + float(chance.uniform(-0.3, 0.3)), 3), {"message": "NCCL error"}))
    return found


@case("A33")
@pytest.mark.parametrize(("first", "again", "seed"), [(13, 14, 0), (30, 28, 5), (0, 3, 7)])
def test_a33_the_host_of_the_first_failure_is_among_the_named_and_the_domain_is_suspect_the_second_time(
    tmp_path: Path, first: int, again: int, seed: int
) -> None:
    run: dict[str, Any] = {"make": healthy(), "hosts": HOSTS, "domains": RACKS}
    made = lines_of_ranks(
        Ranks(65000, 65069, failures=fabric(first, seed), **run),
        Ranks(64945, 65030, failures=fabric(again, seed + 1), **run),
    )
    found = replayed(journal(tmp_path / "run", made))
    one, two = (each for each in found.incidents if "TrainingFailed" in each["alerts"])
    rack = set(HOSTS[4 * (first // 4) : 4 * (first // 4) + 4])
    for incident, host in ((one, HOSTS[first]), (two, HOSTS[again])):
        assert host in incident["scope"]["hosts"]
        assert set(incident["scope"]["hosts"]) <= rack
        assert "300 ms" in says(incident)  # the ambiguity is said
        assert not {"data", "learning_rate"} & set(incident["cause"]["scores"])
        assert (incident["action"] in ("none", "escalate"), incident["plan"]) == (True, None)
    assert two["severity"] == "critical"
    assert one["cause"]["name"] in ("undetermined", "hardware")
    assert two["cause"]["name"] == "hardware"
    assert RACKS[first] in says(two)


def of_a39(seed: int, breaks: dict[int, float], stride: int, last: int = 10_400) -> list[tuple[int, Row]]:
    """A loss of 4.69 that jumps behind the evaluations in ``breaks``: the first time it heals, the second it comes down slowly."""

    def make(step: int, chance: np.random.Generator) -> Row:
        loss = 4.692 + 0.02 * float(chance.normal())
        for at, height in breaks.items():
            if step > at:
                loss += height * math.exp(-(step - at - 1) / (30 * stride if at < 10_000 else 1500))
        return {"loss": loss}

    return rows(stride, last, make, stride=stride, seed=seed)


@case("A39")
@pytest.mark.parametrize(("seed", "stride", "every"), [(0, 1, 2500), (1, 10, 1250), (2, 10, 2500), (3, 50, 2500)])
def test_a39_what_breaks_behind_two_evaluations_is_their_side_effect(
    tmp_path: Path, seed: int, stride: int, every: int
) -> None:
    evaluated = [(step, "evaluation", {"loss": 4.7}) for step in range(every, 10_301, every)]
    saved = [checkpoint(step, 0) for step in (2440, 9940)]
    told = {"can_skip": ["substitute", "shift"]}
    made = lines_of(
        of_a39(seed, {2500: 1.5, 10_000: 2.84}, stride),
        stride=stride,
        samples=16,
        changes=[*evaluated, *saved],
        said={0: told},
    )
    found = replayed(journal(tmp_path / "run", made))
    last = next(one for one in found.told if one["onset_step"] > 9000)
    assert 10_000 < last["onset_step"] <= 10_000 + stride
    assert last["cause"]["name"] == "optimizer_state"
    assert last["cause"]["confidence"] >= 0.8
    assert "right behind the evaluation at step 10000" in says(last)
    assert "without the evaluation" in last["cheapest_test"]
    assert (last["action"], last["plan"]) == ("escalate", None)
    assert all(one["plan"] is None or not one["plan"]["skip_samples"] for one in found.incidents)
    control = lines_of(of_a39(seed, {}, stride), stride=stride, samples=16, changes=evaluated, said={0: told})
    assert replayed(journal(tmp_path / "control", control)).told == []
