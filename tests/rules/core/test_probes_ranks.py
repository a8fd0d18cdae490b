"""Probes of runs with several hosts: the same samples elsewhere tell the machine from the data (cases A24, A38)."""

from __future__ import annotations

from typing import Any

import msgspec
import numpy as np
import pytest

from tests.cases.build import Row
from tests.cases.build_ranks import OfRank, Ranks, healthy, judge_ranks
from trainwarden.plan import Plan

HOSTS = [f"h{number}" for number in range(8)]
ELSEWHERE = [*HOSTS[:7], "h8"]
ALLOWED: dict[str, Any] = {"probe": True, "persist_steps": 40}


def high_from(step: int, rank: int) -> OfRank:
    """One rank's own loss stands out from ``step`` on, and what it adds to the gradient raises that of all behind it."""
    well = healthy()

    def make(at: int, own: int, chance: np.random.Generator) -> Row:
        row = well(at, own, chance)
        if at >= step:
            row["rank_loss"] += 6.0 if own == rank else 0.0
            row["loss"] += 1.5 + (6.0 if own == rank else 0.0)
            row["grad_norm"] *= 6.0
        return row

    return make


BROKEN = Ranks(1, 520, high_from(400, 7), HOSTS, samples=4, checkpoints=(100, 200, 300))


def asked() -> tuple[dict[str, Any], Plan]:
    (incident, *_) = [one for one in judge_ranks(BROKEN, **ALLOWED).told if one["plan"] is not None]
    return incident, msgspec.convert(incident["plan"], Plan)


def tried(make: OfRank, hosts: list[str], **changed: Any) -> list[dict[str, Any]]:
    _, plan = asked()
    assert plan.target is not None
    assert plan.probe is not None
    applied = {
        "plan_id": plan.plan_id,
        "start_step": plan.target.step + 1,
        "target": msgspec.to_builtins(plan.target),
        "probe": msgspec.to_builtins(plan.probe),
        **changed,
    }
    attempt = Ranks(plan.target.step + 1, 720, make, hosts, samples=4, said={"plan_applied": applied})
    return judge_ranks(BROKEN, attempt, **ALLOWED).told


def test_one_hosts_rank_alone_is_tried_elsewhere() -> None:
    incident, plan = asked()
    assert incident["action"] == "probe"
    assert plan.probe is not None
    assert plan.probe.kind == "other_host"
    assert plan.exclude_hosts == ["h7"]
    assert plan.target is not None
    assert plan.target.step == 300
    assert not plan.reset_optimizer
    assert "elsewhere than on h7" in plan.reasons["probe"]
    assert "h7" in plan.reasons["exclude_hosts"]


def test_what_passes_elsewhere_was_the_hardware_there() -> None:
    first = tried(healthy(), ELSEWHERE)[0]
    assert first["verification"]["answer"] == "passed"
    assert first["cause"]["name"] == "hardware"
    assert first["cause"]["confidence"] >= 0.6
    assert "it is the hardware there" in first["summary"]


def test_what_comes_again_elsewhere_goes_with_the_samples() -> None:
    found = tried(high_from(400, 7), ELSEWHERE)
    assert found[0]["verification"]["answer"] == "again"
    assert "it goes with the samples" in found[0]["summary"]
    behind = found[1]
    assert behind["cause"]["scores"].get("hardware", 0.0) < 0.2
    assert behind["cause"]["scores"]["data"] > 0.5


@pytest.mark.parametrize("make", [healthy(), high_from(400, 7)])
def test_on_the_same_host_it_tells_nothing(make: OfRank) -> None:
    first = tried(make, HOSTS)[0]
    assert first["verification"]["answer"] == "unclear"
    assert "it runs on h7 all the same" in " ".join(line["says"] for line in first["timeline"])


def test_an_exporter_that_says_it_runs_there_all_the_same_is_handed_to_a_person() -> None:
    first = tried(healthy(), HOSTS, not_applied={"exclude_hosts": "the run was started on h7"})[0]
    assert (first["state"], first["verdict"]) == ("escalated", "mismatch")
