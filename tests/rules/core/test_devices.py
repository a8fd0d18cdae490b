"""A device that tells of an error: the incident names the rank, the host and the error, and the plan leaves the host out."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

import pytest

from tests.cases.build_ranks import Line, Ranks, healthy, judge_ranks
from tests.cases.test_cases_stall import Live, Run
from tests.rules.core.runs import only
from trainwarden.record import Event, RankStats, Step
from trainwarden.rules.core import devices
from trainwarden.rules.core.block import from_steps
from trainwarden.rules.core.devices import MOST, Told, near, sentence, take
from trainwarden.rules.core.ranks import RankWatch, advance, scan
from trainwarden.rules.core.ranks_apart import named

HOSTS = ("h0", "h1", "h2", "h3")
DOUBLE_BIT = {"what": "xid", "code": 48, "meaning": "two flipped bits", "points_to": "device", "fault": True}
PAGE_FAULT = {"what": "xid", "code": 31, "meaning": "page fault", "points_to": "program", "fault": False}


@dataclass
class Telling(Ranks):
    """Ranks whose exporters tell of their devices: (rank, step behind which, fields)."""

    told: list[tuple[int, int, dict[str, Any]]] = field(default_factory=list)

    def lines(self, number: int, clock: float) -> list[Line]:
        found: list[Line] = []
        late = dict.fromkeys(range(len(self.hosts)), 0)
        for start, rank, line in super().lines(number, clock):
            line.seq += late[rank]
            found.append((start, rank, line))
            for of, step, fields in self.told:
                if isinstance(line, Step) and (of, step) == (rank, line.step):
                    late[rank] += 1
                    event = Event(kind="hardware", time=line.time, seq=line.seq + 1, step=step, fields=dict(fields))
                    found.append((start, rank, event))
        return found


def broken(at: int) -> Any:
    """What ranks log of which none has a finite loss from a step on."""
    well = healthy()

    def make(step: int, rank: int, chance: Any) -> Any:
        row = dict(well(step, rank, chance))
        if step >= at:
            row.update(loss=math.nan, rank_loss=math.nan, grad_norm=math.nan)
        return row

    return make


def judged(*told: tuple[int, int, dict[str, Any]], at: int = 301, **more: Any) -> dict[str, Any]:
    run = Telling(1, at + 30, broken(at), hosts=HOSTS, checkpoints=(200, 250), told=list(told), **more)
    return only(judge_ranks(run, mode="act", receiver=True).incidents)


def test_a_fault_right_before_the_break_names_rank_and_host_and_the_host_is_left_out() -> None:
    incident = judged((2, 300, {**DOUBLE_BIT, "host": "h2"}))
    assert incident["cause"]["name"] == "hardware"
    assert incident["scope"]["ranks"] == [2]
    assert incident["scope"]["hosts"] == ["h2"]
    says = "Rank 2 on h2 reported XID 48 at step 300 (two flipped bits)."
    assert says in [one["says"] for one in incident["evidence"]]
    assert "rank 2 on h2 reported XID 48" in incident["summary"]
    assert "h2" in incident["cheapest_test"]
    assert incident["plan"]["exclude_hosts"] == ["h2"]
    assert "failed" in incident["plan"]["reasons"]["exclude_hosts"]


def test_without_it_the_same_break_is_not_the_hardwares() -> None:
    incident = judged()
    assert incident["cause"]["name"] != "hardware"
    assert incident["plan"]["exclude_hosts"] == []


def test_the_host_is_the_ranks_own_where_the_event_names_none() -> None:
    assert judged((3, 300, DOUBLE_BIT))["scope"]["hosts"] == ["h3"]


def test_a_programs_own_fault_is_told_and_decides_nothing() -> None:
    incident = judged((2, 300, PAGE_FAULT))
    assert incident["cause"]["name"] == judged()["cause"]["name"]
    assert incident["scope"]["ranks"] == []
    assert any("XID 31" in one["says"] for one in incident["evidence"])


def test_a_fault_long_before_weighs_less_and_leaves_out_no_host() -> None:
    close, far = judged((2, 300, DOUBLE_BIT)), judged((2, 120, DOUBLE_BIT))
    assert far["cause"]["scores"]["hardware"] < 0.5 * close["cause"]["scores"]["hardware"]
    assert far["plan"]["exclude_hosts"] == []


def test_on_the_only_host_there_is_none_to_leave_out() -> None:
    run = Telling(1, 331, broken(301), hosts=("h0",) * 4, checkpoints=(200,), told=[(2, 300, DOUBLE_BIT)])
    incident = only(judge_ranks(run, mode="act", receiver=True).incidents)
    assert incident["cause"]["name"] == "hardware"
    assert incident["plan"]["exclude_hosts"] == []


def logging(**signals: Any) -> Any:
    """What healthy ranks log beside signals of their GPUs: each a function of step and rank that returns a number or None."""
    well = healthy()

    def make(step: int, rank: int, chance: Any) -> Any:
        row = dict(well(step, rank, chance))
        row.update({name: value for name, of in signals.items() if (value := of(step, rank)) is not None})
        return row

    return make


def test_a_fault_in_the_records_alone_is_an_incident_that_pages_and_does_nothing_to_a_healthy_run() -> None:
    make = logging(gpu_faults=lambda step, rank: float((step, rank) == (300, 1)) if step % 10 == 0 else None)
    incident = only(judge_ranks(Ranks(1, 400, make, hosts=HOSTS), mode="act", receiver=True).incidents)
    assert incident["alerts"] == ["TrainingGpuFault"]
    assert (incident["severity"], incident["action"]) == ("critical", "none")
    assert incident["cause"]["name"] == "hardware"
    assert incident["scope"]["ranks"] == [1]
    assert incident["scope"]["hosts"] == ["h1"]


def slowed(loss: Any = None) -> Any:
    signals = {
        "gpu_throttled": lambda step, rank: float(step > 300 and rank == 3) if step % 5 == 0 else None,
        "gpu_sm_clock_ratio": lambda step, rank: 0.7 if step > 300 and rank == 3 else 0.95,
    }
    return logging(**signals, **({} if loss is None else {"loss": loss, "rank_loss": loss}))


def test_a_throttled_gpu_is_named_and_the_hardware_is_why() -> None:
    incident = only(judge_ranks(Ranks(1, 600, slowed(), hosts=HOSTS)).incidents)
    assert incident["alerts"] == ["TrainingGpuThrottled"]
    assert (incident["severity"], incident["action"]) == ("warning", "none")
    assert incident["cause"]["name"] == "hardware"
    assert incident["scope"]["ranks"] == [3]
    assert incident["scope"]["hosts"] == ["h3"]
    assert any("slowed by heat" in one["says"] for one in incident["evidence"])


def test_heat_is_never_why_a_loss_is_off() -> None:
    def up(step: int, rank: int) -> float | None:
        return 6.0 + 0.01 * rank if step > 480 else None

    incidents = judge_ranks(Ranks(1, 600, slowed(up), hosts=HOSTS)).incidents
    both = [one for one in incidents if {"TrainingGpuThrottled", "TrainingLossSpike"} <= set(one["alerts"])]
    assert both, [one["alerts"] for one in incidents]
    assert all(one["cause"]["name"] != "hardware" for one in both)


@pytest.mark.parametrize("late", [0.0, 2400.0])
def test_a_hang_names_the_xid_that_came_before_it_was_seen_or_after(late: float) -> None:
    run = Run().steps(300, 2.0)
    lost = {
        "what": "xid",
        "code": 79,
        "meaning": "fell off the bus",
        "points_to": "device",
        "fault": True,
        "host": "h0",
    }
    run.clock += late
    live = Live()
    if late:
        live.follow(run)
        assert len(live.stalls) == 1
    run.event("hardware", **lost)
    if not late:
        run.clock += 2400.0
    live.follow(run)
    (stall,) = live.stalls
    assert stall["cause"]["name"] == "hardware"
    assert any("XID 79 at step 300 (fell off the bus)" in one["says"] for one in stall["evidence"])
    assert stall["scope"]["hosts"] == ["h0"]
    assert any("No sign of progress" in one["says"] for one in stall["evidence"])
    assert "No sign of progress" in stall["summary"].replace("no sign", "No sign")
    assert "XID 79" in stall["summary"]
    assert "py-spy" in stall["cheapest_test"]


# What is remembered.


def event(step: int | None = 5, **fields: Any) -> Event:
    return Event(kind="hardware", time=1.0, step=step, fields=fields)


def test_what_is_no_error_is_left_alone_and_no_more_than_some_are_kept() -> None:
    known: list[Told] = []
    for fields in ({}, {"what": "device"}, {"what": "xid", "code": "79"}, {"what": "xid", "code": True}, {"what": 3}):
        assert not take(known, 0, event(**fields), {})
    assert not take(known, 0, event(None, **DOUBLE_BIT), {})
    assert known == []
    assert take(known, 1, event(what="xid", code=63, points_to=["device"], meaning=4), {1: "h9"})
    assert known == [Told(5, 1, 63, "", 0.3, False, "h9")]
    for step in range(2 * MOST):
        take(known, 0, event(step, **DOUBLE_BIT), {})
    assert len(known) == MOST


def test_of_one_error_that_repeats_the_first_close_one_is_told_and_the_weightiest_comes_first() -> None:
    known: list[Told] = []
    for step, rank, fields in ((100, 1, DOUBLE_BIT), (298, 1, DOUBLE_BIT), (299, 1, DOUBLE_BIT), (297, 0, PAGE_FAULT)):
        take(known, rank, event(step, **fields), {})
    found = near(known, 300, 320, 1)
    assert [(one.step, one.rank) for one in found] == [(298, 1), (297, 0)]
    assert near(known, 300 + 2 * devices.BEFORE, 5000, 1) == ()
    assert near(known, 90, 95, 1) == ()  # what has not happened yet


def test_a_gpu_that_is_lost_is_told_without_a_number() -> None:
    known: list[Told] = []
    take(known, 4, event(what="lost", meaning="NVML no longer reaches the GPU", host="h1"), {})
    assert sentence(known[0]) == "Rank 4 on h1 lost its GPU at step 5 (NVML no longer reaches the GPU)."
    assert known[0].fault


def test_a_rank_is_named_from_what_the_records_of_one_rank_say_of_all() -> None:
    stats = [{"gpu_faults": RankStats(0.0, 1.0, 1.0, 6, 8)} if step == 3 else {} for step in range(1, 5)]
    steps = [Step(seq=at, step=at, time=at, signals={"loss": 2.0}, ranks=ranks) for at, ranks in enumerate(stats, 1)]
    rows = scan(from_steps(steps))
    assert rows is not None
    watch = RankWatch()
    advance(watch, rows, 0, len(steps))
    assert named(watch.apart, ["faulty"], 1)["faulty"].ranks == (6,)
