"""Functions over ranks that compare them for long or to the last digit: against plain loops, for any cut, over a restart."""

from __future__ import annotations

import math
import statistics

import numpy as np
import pytest

from tests.rules.language.streams import record, values_of
from trainwarden.record import RankStats, Step


def ranks(*rows: dict[int, float | None], name: str = "rank_loss") -> tuple[list[Step], list[dict[int, Step]]]:
    steps = [record(place, loss=1.0) for place in range(1, len(rows) + 1)]
    own = [
        {rank: record(step.step, **{name: value}) for rank, value in row.items()}
        for step, row in zip(steps, rows, strict=True)
    ]
    return steps, own


def test_the_middle_of_the_ranks_own_values_leaves_out_what_a_record_holds_for_all() -> None:
    steps, own = ranks({0: 1.0, 1: 4.0, 2: 2.0}, {0: 1.0, 1: math.nan, 2: 2.0}, {0: 1.0, 1: 2.0, 2: 3.0, 3: 8.0})
    for step in steps:
        step.ranks["loss"] = RankStats(min=0.0, max=50.0, sum=99.0, argmax=1, n=9)
    assert values_of("median_over(loss by rank)", steps, own) == [2.0, 1.5, 2.5]
    assert values_of("median_over(loss by rank)", steps, None) == [None] * 3
    steps, own = ranks({0: 1.0, 1: 4.0})
    assert values_of("median_over(loss by rank)", steps, own) == [None]


def test_twins_are_counted_unless_all_come_in_groups_of_one_size() -> None:
    rows: list[dict[int, float | None]] = [
        {0: 1.0, 1: 2.0, 2: 3.0, 3: 4.0},
        {0: 1.0, 1: 2.0, 2: 2.0, 3: 4.0},
        {0: 1.0, 1: 1.0, 2: 2.0, 3: 2.0},
        {0: 5.0, 1: 5.0, 2: 5.0, 3: 5.0},
        {0: 5.0, 1: 5.0, 2: 5.0, 3: 4.0},
        {0: math.nan, 1: math.nan, 2: 5.0, 3: 4.0},
    ]
    assert values_of("twins(loss by rank)", *ranks(*rows)) == [0.0, 2.0, 0.0, 0.0, 3.0, 0.0]


def test_ranks_that_disagree_are_counted_by_the_majority_of_what_was_measured_at_once() -> None:
    steps, own = ranks(
        {0: 7.0, 1: 7.0, 2: 7.0},
        {},
        {0: 8.0, 1: 8.0, 2: 9.0},
        {0: 9.0},  # alone: the others did not report yet
        {0: 1.0, 1: 2.0, 2: 3.0},
        {0: 1.0, 1: 1.0, 2: 1.0},
        name="param_hash",
    )
    assert values_of("disagree(param_hash by rank)", steps, own) == [0.0, 0.0, 1.0, 1.0, math.inf, 0.0]
    assert values_of("disagree(param_hash by rank)", steps[1:2], own[1:2]) == [None]


def test_where_only_what_a_record_holds_for_all_is_read_ranks_disagree_or_do_not() -> None:
    steps = [record(place, loss=1.0) for place in (1, 2)]
    for step, high in zip(steps, (5.0, 6.0), strict=True):
        step.ranks["param_hash"] = RankStats(min=5.0, max=high, sum=0.0, argmax=0, n=8)
    assert values_of("disagree(param_hash by rank)", steps) == [0.0, math.inf]


@pytest.mark.parametrize("seed", range(3))
def test_uneven_and_ahead_are_what_a_plain_loop_gives(seed: int) -> None:
    chance = np.random.default_rng(seed)
    rows: list[dict[int, float | None]] = [
        {
            rank: float(chance.lognormal(0.3 * rank, 0.4))
            for rank in range(5)
            if chance.random() > 0.1 and not (rank == 4 and step < 30)
        }
        for step in range(90)
    ]
    rows[40][1] = math.nan
    rows[50][2] = 0.0
    beta = 0.9
    means, weights = dict.fromkeys(range(5), 0.0), dict.fromkeys(range(5), 0.0)
    counts = dict.fromkeys(range(5), 0)
    both: list[float | None] = []
    above: list[float | None] = []
    for row in rows:
        for rank, value in row.items():
            if value is not None and value > 0:
                means[rank] = beta * means[rank] + (1 - beta) * value
                weights[rank] = beta * weights[rank] + (1 - beta)
                counts[rank] += 1
        averages = [means[rank] / weights[rank] for rank in range(5) if counts[rank] >= 20]
        if len(averages) < 2:
            both.append(None)
            above.append(None)
            continue
        middle = statistics.median(averages)
        above.append(max(averages) / middle)
        both.append(max(max(averages) / middle, middle / min(averages)))
    steps, own = ranks(*rows)
    assert values_of("uneven(loss by rank, beta=0.9)", steps, own) == pytest.approx(both)
    assert values_of("ahead(loss by rank, beta=0.9)", steps, own) == pytest.approx(above)
