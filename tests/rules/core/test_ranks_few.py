"""Of two or three ranks the one is named that leaves its own past while the others stay in theirs, and nobody where all leave it."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.rules.core.runs import Attempt, Played, core, default_pack
from tests.rules.core.test_ranks_apart import block
from tests.rules.language.streams import record, values_of
from trainwarden.record import Step
from trainwarden.rules.core.inputs import Happened, Steps
from trainwarden.rules.core.ranks import Mark, RankWatch, advance, scan

#: Adds to the loss of a rank at a step.
Fault = Callable[[int, int], float]


def losses(world: int, count: int, fault: Fault, seed: int = 0) -> list[list[float]]:
    """Losses by step and rank: a common decline, noise, heavy tails now and then, and sources of their own level."""
    chance = np.random.default_rng(seed)
    noise = 0.05 * chance.standard_t(6, (count, world))
    return [
        [2 + 3 * (step + 1) ** -0.35 + 0.2 * rank + noise[step, rank] + fault(step + 1, rank) for rank in range(world)]
        for step in range(count)
    ]


def marks(rows: Sequence[Sequence[float]], cuts: Sequence[int] = ()) -> list[Mark]:
    watch, found = RankWatch(), []
    whole = block([{rank: {"rank_loss": value} for rank, value in enumerate(row)} for row in rows])
    for first, end in pairwise([0, *cuts, len(rows)]):
        seen = scan(whole.rows(first, end))
        assert seen is not None
        found += advance(watch, seen, 0, end - first)
    return found


def played(rows: Sequence[Sequence[float]]) -> Played:
    """Play a run in which all ranks' records are read; the mean is the loss of each."""
    found = core(default_pack())
    attempt = Attempt(last=len(rows), world_size=len(rows[0]), end=None, checkpoint_every=0)
    for rank in range(len(rows[0])):
        for line in attempt.lines():
            if not isinstance(line, Step):
                found.take(Happened(attempt.who, rank, line))
    for line in attempt.lines():
        if isinstance(line, Step):
            row = rows[line.step - 1]
            for rank, value in enumerate(row):
                signals = {**line.signals, "loss": float(np.mean(row)), "rank_loss": value}
                own = Step(seq=line.seq, step=line.step, time=line.time, signals=signals)
                found.take(Steps(attempt.who, rank, (own,)))
    return found


def junk(step: int, rank: int) -> float:
    return 2.0 if rank == 1 and step >= 150 else 0.0


def healthy(step: int, rank: int) -> float:
    return 0.0


def of_all(step: int, rank: int) -> float:
    return (2.0 + rank) * (step >= 150)


@pytest.mark.parametrize("world", [2, 3])
def test_the_rank_that_leaves_its_past_alone_is_named_and_its_incident_opens_within_two_steps(world: int) -> None:
    found = played(losses(world, 200, junk))
    (incident,) = [one for one in found.incidents if "TrainingRankApart" in one["alerts"]]
    assert incident["scope"]["ranks"] == [1]
    assert (incident["onset_step"], incident["opened_step"]) in ((150, 150), (150, 151))


@pytest.mark.parametrize("world", [2, 3])
@pytest.mark.parametrize("seed", range(3))
def test_of_healthy_ranks_none_is_named(world: int, seed: int) -> None:
    assert marks(losses(world, 4000, healthy, seed)) == []


@pytest.mark.parametrize("world", [2, 3])
def test_a_fault_that_all_ranks_meet_names_none(world: int) -> None:
    rows = losses(world, 200, of_all)
    assert marks(rows) == []
    found = played(rows)
    assert found.incidents
    assert all("TrainingRankApart" not in one["alerts"] and not one["scope"]["ranks"] for one in found.incidents)


def test_two_of_three_that_leave_their_past_are_no_matter_of_one() -> None:
    assert marks(losses(3, 200, lambda step, rank: 2.0 * (rank > 0 and step >= 150))) == []


@settings(max_examples=30, deadline=None)
@given(cuts=st.lists(st.integers(1, 179), max_size=5), world=st.integers(2, 3))
def test_any_cut_of_the_records_gives_the_same_marks(cuts: list[int], world: int) -> None:
    rows = losses(world, 180, junk)
    found = marks(rows)
    assert [mark.ranks for mark in found][:2] == [[1], [1]]
    assert marks(rows, sorted(set(cuts))) == found


def test_the_function_says_by_how_many_of_its_own_deviations_the_rank_is_off() -> None:
    rows = [[2.0 + 0.1 * (step % 2), 3.0 + 0.1 * (step % 2)] for step in range(400)]
    rows += [[2.05, 5.05], [4.05, 5.05], [math.nan, 3.0], [2.0, 3.0]]
    steps = [record(place, loss=1.0) for place in range(1, len(rows) + 1)]
    own = [
        {rank: record(step.step, rank_loss=value) for rank, value in enumerate(row)}
        for step, row in zip(steps, rows, strict=True)
    ]
    found = values_of("alone(loss by rank)", steps, own)
    assert found[:20] == [None] * 20
    assert found[20:400] == [0.0] * 380
    assert found[400] == pytest.approx(2.0 / (0.8862 * 0.1), rel=0.05)
    assert found[401:] == [0.0, 0.0, 0.0]
    four = [{rank: record(step.step, rank_loss=1.0) for rank in range(4)} for step in steps]
    assert values_of("alone(loss by rank)", steps, four) == [None] * len(steps)
