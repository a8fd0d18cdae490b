from __future__ import annotations

import math

import pytest

from tests.rules.language.streams import record, rows_of, values_of
from trainwarden.record import RankStats, Step


def ranks(*rows: dict[int, float]) -> tuple[list[Step], list[dict[int, Step]]]:
    steps = [record(place, loss=1.0) for place in range(1, len(rows) + 1)]
    own = [
        {rank: record(step.step, rank_loss=value) for rank, value in row.items()}
        for step, row in zip(steps, rows, strict=True)
    ]
    return steps, own


def test_vectors_over_ranks() -> None:
    steps, own = ranks({0: 1.0, 1: 4.0, 2: 2.0}, {0: 5.0, 1: math.nan, 2: 2.0})
    assert values_of("spread(loss by rank)", steps, own) == [3.0, 3.0]
    assert values_of("argmax(loss by rank)", steps, own) == [1.0, 0.0]
    assert values_of("max_over(loss by rank)", steps, own) == [4.0, 5.0]
    assert values_of("min_over(loss by rank)", steps, own) == [1.0, 2.0]


def test_a_rank_that_is_late_lends_its_last_value_and_one_rank_has_no_spread() -> None:
    steps, own = ranks({0: 1.0}, {0: 1.0, 1: 3.0}, {0: 2.0})
    assert values_of("spread(loss by rank)", steps, own) == [None, 2.0, 1.0]
    assert [fresh for _, fresh in rows_of("max_over(loss by rank)", steps, own)] == [True, True, True]


def test_what_a_rank_logged_as_loss_counts_where_it_has_no_rank_loss() -> None:
    steps = [record(1, loss=1.0)]
    own = [{0: record(1, loss=1.0, rank_loss=7.0), 1: record(1, loss=2.0)}]
    assert values_of("spread(loss by rank)", steps, own) == [5.0]


def test_a_grouped_signal_gives_the_total_of_each_rank_and_a_norm_of_all_ranks_is_not_that_of_a_shard() -> None:
    steps = [record(1, grad_norm={"all": 1.0})]
    own = [
        {
            0: record(1, grad_norm={"all": 1.0, "mlp": 0.7}, rank_grad_norm=0.2),
            1: record(1, grad_norm={"all": 1.5, "mlp": 0.9}, rank_grad_norm=0.9),
        }
    ]
    assert values_of("spread(grad_norm by rank)", steps, own) == [0.5]
    assert values_of("spread(rank_grad_norm by rank)", steps, own) == [pytest.approx(0.7)]


def test_more_than_half_of_the_members_alike_have_no_distance_from_their_middle() -> None:
    steps, own = ranks({0: 2.0, 1: 2.0, 2: 2.0, 3: 9.0}, {0: 1.0, 1: 2.0, 2: 4.0}, {0: 1.0, 1: 3.0})
    assert values_of("mad_over(loss by rank)", steps[:1], own[:1]) == [0.0]
    assert values_of("mad_over(loss by rank)", steps[1:2], own[1:2]) == [1.0]
    assert values_of("mad_over(loss by rank)", steps[2:], own[2:]) == [1.0]


def test_members_that_are_not_finite_are_counted() -> None:
    steps, own = ranks({0: 1.0, 1: 2.0}, {0: math.nan, 1: math.inf, 2: 1.0}, {0: math.nan, 1: math.nan})
    assert values_of("nonfinite_over(loss by rank)", steps, own) == [0.0, 2.0, 2.0]
    assert values_of("nonfinite_over(loss by rank)", steps[:1]) == [None]


def test_the_extremes_that_a_record_holds_stand_for_ranks_without_records() -> None:
    steps = [record(1, loss=1.0), record(2, loss=1.0), record(3, loss=1.0)]
    steps[0].ranks["loss"] = RankStats(min=1.0, max=4.0, sum=70.0, argmax=7, n=32)
    steps[2].ranks["loss"] = RankStats(min=0.0, max=9.0, sum=70.0, argmax=3, n=32)
    assert values_of("spread(loss by rank)", steps) == [3.0, 3.0, 9.0]
    assert values_of("argmax(loss by rank)", steps) == [7.0, 7.0, 3.0]
    own = [{}, {}, {2: record(3, loss=9.0), 5: record(3, loss=10.0)}]
    assert values_of("argmax(loss by rank)", steps, own) == [7.0, 7.0, 5.0]
    assert values_of("argmax(loss by rank)", steps[:2]) == [7.0, 7.0]
    assert values_of("spread(loss by rank)", steps[:2]) == [3.0, 3.0]
    assert values_of("max_over(loss by rank)", steps[2:]) == [9.0]
    assert values_of("min_over(loss by rank)", steps[:1]) == [1.0]


def test_vectors_over_groups_leave_the_total_out() -> None:
    steps = [record(1, grad_norm={"all": 9.0, "mlp": 3.0, "embedding": 5.0}), record(2)]
    assert values_of("max_over(grad_norm by group)", steps) == [5.0, 5.0]
    assert values_of("argmax(grad_norm by group)", steps) == [1.0, 1.0]  # all, embedding, attention, mlp, …
    moments = [record(1, moment_rms={"exp_avg": {"all": 9.0, "mlp": 3.0}, "exp_avg_sq": {"mlp": 8.0}})]
    assert values_of('max_over(moment_rms{moment="exp_avg"} by group)', moments) == [3.0]
    assert values_of("max_over(lr by group)", [record(1, lr={"all": 3.0, "0": 1.0, "1": 3.0})]) == [3.0]


def test_without_members_a_vector_is_unknown_and_with_nan_alone_it_is_nan() -> None:
    assert values_of("max_over(loss by rank)", [record(1, loss=1.0)]) == [None]
    steps, own = ranks({0: math.nan, 1: math.nan})
    assert math.isnan(values_of("spread(loss by rank)", steps, own)[0])
