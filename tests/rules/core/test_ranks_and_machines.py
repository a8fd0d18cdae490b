"""Which ranks stand out, on which hosts, who failed first, and what replaying the same steps teaches."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.cases.build_ranks import Line, Ranks, healthy
from tests.cases.test_cases_ranks_and_repeats import EIGHT, broken_from, fabric
from tests.rules.core.runs import Attempt, Played, core, default_pack, healthy_loss
from trainwarden.record import Event, RankStats, Step
from trainwarden.rules.core.block import from_steps
from trainwarden.rules.core.drift import first_sign
from trainwarden.rules.core.feed import dump, load
from trainwarden.rules.core.inputs import Happened, Steps
from trainwarden.rules.core.machines import Machines, describe, failed, first_failed, narrow
from trainwarden.rules.core.ranks import Mark, RankWatch, advance, scan
from trainwarden.rules.core.replays import same_batches, same_losses, same_samples
from trainwarden.rules.core.settings import Settings
from trainwarden.rules.core.state import Checkpoint
from trainwarden.rules.core.targets import choose
from trainwarden.rules.core.trace import Trace


def block(rows: list[dict[int, dict[str, Any]]]) -> Any:
    own = [
        {rank: Step(seq=0, step=at, time=0.0, signals=signals) for rank, signals in row.items()}
        for at, row in enumerate(rows, 1)
    ]
    return from_steps([row[0] for row in own], own)


def marks(rows: list[dict[int, dict[str, Any]]], watch: RankWatch | None = None) -> list[Mark]:
    found = scan(block(rows))
    assert found is not None
    return advance(watch or RankWatch(), found, 0, len(rows))


def test_one_rank_whose_loss_is_no_number_is_marked_and_all_ranks_are_nobody() -> None:
    one = {rank: {"rank_loss": math.nan if rank == 2 else 2.0 + rank / 100} for rank in range(4)}
    every = {rank: {"rank_loss": math.nan} for rank in range(4)}
    half = {rank: {"rank_loss": math.nan if rank < 2 else 2.0} for rank in range(4)}
    most = {rank: {"rank_loss": math.nan if rank < 3 else 2.0} for rank in range(4)}
    assert marks([one, every, half, most]) == [Mark(1, "nonfinite", [2]), Mark(3, "nonfinite", [0, 1])]


def test_a_loss_that_is_absent_is_no_loss_that_is_no_number() -> None:
    assert marks([{0: {"rank_loss": 2.0}, 1: {}, 2: {"rank_loss": 2.1}}] * 2) == []


def test_a_rank_far_above_the_others_is_marked_from_four_ranks_on() -> None:
    high = {rank: {"loss": 9.0 if rank == 1 else 2.0 + rank / 100} for rank in range(5)}
    few = {rank: {"loss": 9.0 if rank == 1 else 2.0 + rank / 100} for rank in range(3)}
    assert marks([high]) == [Mark(1, "loss", [1])]
    assert marks([few]) == []


def test_a_shared_norm_that_one_rank_has_alone_is_marked_and_of_two_neither_is() -> None:
    agree = {rank: {"grad_norm": {"all": 1.0}} for rank in range(4)}
    odd = {rank: {"grad_norm": {"all": 1.003 if rank == 3 else 1.0}} for rank in range(4)}
    assert marks([agree, odd]) == [Mark(2, "shared", [3])]
    two = [{0: {"grad_norm": 1.0}, 1: {"grad_norm": 1.0}}] * 100 + [{0: {"grad_norm": 1.0}, 1: {"grad_norm": 1.1}}]
    assert marks(two) == [Mark(101, "shared", [])]
    assert marks(two[1:]) == []  # they had not agreed for long enough


def lone(at: int, signals: dict[str, Any] | None = None, **ranks: tuple[float, float, float, int, int]) -> Step:
    """A record of rank 0 that says of all ranks (min, max, sum, argmax, n)."""
    stats = {name.replace("__", "."): RankStats(*told) for name, told in ranks.items()}
    return Step(seq=at, step=at, time=float(at), signals=signals or {"loss": 2.0, "rank_loss": 2.0}, ranks=stats)


def lone_marks(records: list[Step], watch: RankWatch | None = None) -> list[Mark]:
    found = scan(from_steps(records))
    assert found is not None
    return advance(watch or RankWatch(), found, 0, len(records))


def test_where_one_ranks_records_are_read_alone_they_name_the_rank_that_stands_out() -> None:
    usual = lone(1, loss=(1.9, 2.1, 8.0, 1, 4))
    high = lone(2, loss=(1.9, 9.0, 14.9, 3, 4))
    few = lone(3, loss=(1.9, 9.0, 12.9, 1, 3))
    bad = lone(4, loss=(1.9, math.nan, math.nan, 2, 4))
    infinite = lone(5, loss=(1.9, math.inf, math.inf, 2, 4))
    every = lone(6, loss=(math.nan, math.nan, math.nan, 0, 4))
    most = lone(7, loss=(1.9, math.nan, math.nan, 0, 4), nonfinite__loss=(0.0, 1.0, 3.0, 0, 4))
    assert lone_marks([usual, high, few, bad, infinite, every, most]) == [
        Mark(2, "loss", [3]),
        Mark(4, "nonfinite", [2]),
        Mark(5, "nonfinite", [2]),
    ]


def test_where_one_ranks_records_are_read_alone_a_norm_that_is_not_shared_is_seen() -> None:
    agree = [lone(at, grad_norm=(1.0, 1.0, 4.0, 0, 4)) for at in range(1, 101)]
    low = lone(101, grad_norm=(0.9, 1.0, 3.9, 0, 4))
    high = lone(102, grad_norm=(1.0, 1.1, 4.1, 3, 4))
    assert lone_marks([*agree, low, high]) == [Mark(101, "shared", []), Mark(102, "shared", [3])]
    assert lone_marks([*agree[1:], low]) == []


def test_where_one_ranks_records_are_read_alone_losses_that_are_one_are_counted() -> None:
    watch = RankWatch()
    lone_marks([lone(1, loss=(1.0, 2.0, 6.0, 0, 4)), *(lone(at, loss=(2.0, 2.0, 8.0, 0, 4)) for at in (2, 3))], watch)
    assert watch.same == 2


def test_what_a_record_says_of_all_ranks_counts_for_nothing_where_their_own_records_are_read() -> None:
    own = {rank: lone(1, {"rank_loss": 2.0 + rank / 100}, loss=(2.0, 99.0, 105.0, 3, 4)) for rank in range(4)}
    found = scan(from_steps([own[0]], [own]))
    assert found is not None
    assert advance(RankWatch(), found, 0, 1) == []


def test_a_loss_that_the_ranks_combined_is_no_ranks_own() -> None:
    own = {
        rank: lone(1, {"loss": 2.5} | ({"rank_loss": float(rank)} if rank > 1 else {}), loss=(2.0, 3.0, 5.0, 3, 2))
        for rank in range(4)  # the last two own the loss: stages of a pipeline
    }
    found = from_steps([own[0]], [own])
    assert found.columns["loss",].values[0] == 2.5
    assert sorted(found.ranks) == [("rank_loss", 2), ("rank_loss", 3)]


def test_an_incident_names_the_rank_of_the_largest_loss_where_rank_0_is_watched_alone() -> None:
    def change(step: int, signals: dict[str, Any]) -> None:
        if step == 400:
            signals["loss"] += 6.0 / 4  # the mean over four ranks, one of which read junk

    class Alone(Attempt):
        def record(self, step: int, seq: int) -> Step:
            found = super().record(step, seq)
            own = [healthy_loss(step, 1000 + rank, noise=0.05) + 6.0 * (step == 400 and rank == 2) for rank in range(4)]
            found.signals["rank_loss"] = own[0]
            found.ranks["loss"] = RankStats(min(own), max(own), sum(own), own.index(max(own)), 4)
            return found

    played = core(default_pack())
    played.play(Alone(last=450, world_size=1, changes=[change], start={"hostname": "a"}))
    assert [incident["scope"]["ranks"] for incident in played.incidents] == [[2]]
    assert "rank 2" in played.incidents[0]["summary"]


def test_how_the_records_are_cut_makes_no_difference() -> None:
    chance = np.random.default_rng(1)
    rows: list[dict[int, dict[str, Any]]] = []
    for at in range(300):
        same = chance.random() < 0.9
        value = float(chance.normal())
        rows.append(
            {
                rank: {
                    "rank_loss": value if same else float(chance.normal()),
                    "grad_norm": 1.0 + (0.1 * rank if at > 200 else 0),
                }
                for rank in range(3)
            }
        )
    one, many = RankWatch(), RankWatch()
    whole = marks(rows, one)
    pieces, first = [], 0
    for size in [1, 2, 3, 50, 44, 100, 100]:
        found = scan(block(rows).rows(first, first + size))
        assert found is not None
        for row in range(0, size, 2):
            pieces += advance(many, found, row, min(row + 2, size))
        first += size
    assert pieces == whole
    assert many == one


def test_hosts_domains_and_versions_come_from_each_ranks_own_start() -> None:
    machines = Machines()
    describe(
        machines, 0, {"hostname": "a", "domain": "r0", "precision": "bfloat16", "torch": "2.6", "nccl": [2, 25, 1]}
    )
    describe(machines, 1, {"host": "b", "rack": "r1", "environment": {"precision": "fp8"}})
    describe(machines, 2, {"hostname": 7})
    assert machines.hosts == {0: "a", 1: "b"}
    assert machines.domains == {0: "r0", 1: "r1"}
    assert machines.versions == {"precision": "fp8", "torch": "2.6", "nccl": "2.25.1"}
    assert narrow(machines.versions) == "fp8"
    assert narrow({"precision": "bfloat16"}) == ""


def test_failures_are_ordered_within_the_clocks() -> None:
    machines = Machines()
    for rank, time in ((0, 10.9), (1, 10.0), (2, 10.5), (3, 10.61)):
        assert failed(machines, rank, Event(kind="error", time=time))
    assert not failed(machines, 1, Event(kind="error", time=9.0))
    assert first_failed(machines.failures) == [1, 2]


@pytest.mark.parametrize(
    ("kind", "fields"), [("exit", {"reason": "finished"}), ("exit", {"reason": "signal"}), ("epoch", {})]
)
def test_an_end_that_is_no_failure_is_none(kind: str, fields: dict[str, Any]) -> None:
    assert not failed(Machines(), 0, Event(kind=kind, time=1.0, fields=fields))


def trace(seed: int, first: int = 1, last: int = 200, **more: Any) -> Trace:
    found = Trace(limit=4000)
    for step in range(first, last + 1):
        loss = 2.0 + float(np.random.default_rng((seed, step)).normal())
        found.append(
            Step(
                seq=step, step=step, time=0.0, signals={"loss": loss + more.get("off", 0.0)}, samples=[(step, step + 1)]
            )
        )
    return found


def test_the_same_batches_show_in_the_noise_of_the_losses() -> None:
    assert same_losses(trace(1), trace(1, first=100, off=0.3), 150) is True
    assert same_losses(trace(1), trace(2, first=100), 150) is False
    assert same_losses(trace(1), trace(1, first=140), 150) is None
    assert same_samples(trace(1), trace(2), 100, 120) is True
    assert same_samples(trace(1), trace(1, first=300, last=310), 100, 120) is None


def test_the_same_positions_of_another_order_are_other_batches() -> None:
    assert same_batches(trace(1), trace(1, first=100, off=0.3), 130, 150)
    assert not same_batches(trace(1), trace(2, first=100), 130, 150)  # the same positions, other losses
    assert same_batches(trace(1), trace(2, first=140), 141, 150)  # too few losses to tell: the positions count
    assert not same_batches(trace(1), trace(1, first=300, last=310), 130, 150)


def scales(falls: int) -> Trace:
    found = Trace(limit=4000)
    for step in range(10, 7000, 10):
        scale = 65536.0 / 2 ** (max(0, step - falls) // 400) * (2 if step // 500 % 2 else 1)
        found.append(Step(seq=step, step=step, time=0.0, stride=10, signals={"loss": 2.0, "loss_scale": scale}))
    return found


def test_a_loss_scale_that_falls_for_long_is_a_first_sign_and_one_that_only_moves_is_none() -> None:
    sign = first_sign(scales(4700), None, 7000)
    assert sign is not None
    assert 4700 <= sign <= 5600
    assert first_sign(scales(100_000), None, 7000) is None
    assert first_sign(Trace(limit=10), None, 7000) is None


def test_the_target_is_older_than_the_first_sign_unless_the_cause_is_sudden_or_there_is_none_so_old() -> None:
    known = [Checkpoint(0, step, str(step), complete=True) for step in (3000, 6210)]
    for cause, sign, wanted in (("learning_rate", 4700, 3000), ("data", 4700, 6210), ("learning_rate", 2000, 6210)):
        chosen = choose(known, [], 7000, 1, cause, None, drift=sign)
        assert chosen is not None
        assert chosen.target.step == wanted


def all_lines() -> list[Line]:
    errors = fabric(3, 0)[:8]
    attempts = (
        Ranks(1, 320, broken_from(300, 7), EIGHT, samples=4, checkpoints=(100, 200), failures=errors),
        Ranks(201, 420, broken_from(400, 7), EIGHT, seed=1, samples=4, failures=errors),
        Ranks(201, 440, healthy(), EIGHT, samples=4),
    )
    return [line for number, attempt in enumerate(attempts) for line in attempt.lines(number, 1e9 + 5000.0 * number)]


def played(lines: list[Line], sizes: list[int], restart: int = 0) -> Played:
    """Feed the lines with runs of each rank's records of these sizes; store and read back every ``restart`` inputs."""
    found = core(default_pack())
    held: dict[tuple[Any, int], list[Step]] = {}
    count, fed = 0, 0

    def hand_over() -> None:
        nonlocal fed
        for (start, rank), records in held.items():
            found.take(Steps(start, rank, tuple(records)))
            fed += 1
            if restart and fed % restart == 0:
                found.state = load(dump(found.state), Settings(), default_pack())
        held.clear()

    for start, rank, item in lines:
        if isinstance(item, Event):
            hand_over()
            found.take(Happened(start, rank, item))
            continue
        held.setdefault((start, rank), []).append(item)
        if rank == 7:
            count += 1
            if count >= sizes[item.step % len(sizes)]:
                hand_over()
                count = 0
    hand_over()
    return found


def rows(found: Played) -> list[dict[str, Any]]:
    return sorted(found.incidents, key=lambda row: str(row["id"]))


@pytest.fixture(scope="module")
def whole() -> list[dict[str, Any]]:
    found = rows(played(all_lines(), [1]))
    assert [one["scope"]["hosts"] for one in found if "TrainingNonFinite" in one["alerts"]] == [["h7"], ["h7"]]
    return found


@settings(max_examples=3, deadline=None)
@given(sizes=st.lists(st.integers(1, 40), min_size=2, max_size=5))
def test_any_cut_and_any_restart_give_the_same_incidents_of_several_ranks(
    sizes: list[int], whole: list[dict[str, Any]]
) -> None:
    assert rows(played(all_lines(), sizes)) == whole
    assert rows(played(all_lines(), sizes, restart=23)) == whole
