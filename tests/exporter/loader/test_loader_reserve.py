from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from trainwarden.exporter.loader.ranges import RangeSet
from trainwarden.exporter.loader.reserve import Reserve
from trainwarden.exporter.loader.shards import Shards
from trainwarden.orderkey import reserve_size

NOWHERE = -1


def stand_ins(reserve: Reserve, epoch: int, positions: list[int], shard: int = NOWHERE) -> list[int]:
    return reserve.stand_ins(epoch, np.array(positions), np.full(len(positions), shard)).tolist()


def test_one_percent_is_held_back_and_at_least_a_batch_where_that_is_a_tenth() -> None:
    assert reserve_size(100_000, 0.01, 64) == 1000
    assert reserve_size(1000, 0.01, 64) == 64
    assert reserve_size(100, 0.01, 64) == 10
    assert reserve_size(5, 0.01, 64) == 0
    assert reserve_size(1000, 0.0, 64) == 0
    with pytest.raises(ValueError, match="reserve: 2"):
        reserve_size(1000, 2, 64)


def test_the_rows_held_back_are_a_function_of_the_seed() -> None:
    assert Reserve(1000, 20, 3).rows.tolist() == Reserve(1000, 20, 3).rows.tolist()
    assert Reserve(1000, 20, 3).rows.tolist() != Reserve(1000, 20, 4).rows.tolist()
    assert len(set(Reserve(1000, 20, 3).rows.tolist())) == 20


@given(st.sets(st.integers(0, 400), min_size=1, max_size=40), st.sets(st.integers(0, 400), max_size=40))
def test_what_stands_in_does_not_depend_on_what_else_is_skipped(skipped: set[int], more: set[int]) -> None:
    reserve = Reserve(2000, 50, 1)
    few, many = sorted(skipped), sorted(skipped | more)
    of_many = dict(zip(many, stand_ins(reserve, 2, many), strict=True))
    assert stand_ins(reserve, 2, few) == [of_many[position] for position in few]


def test_neighbouring_positions_get_different_rows() -> None:
    reserve = Reserve(2000, 50, 1)
    assert len(set(stand_ins(reserve, 0, list(range(100, 150))))) == 50
    assert stand_ins(reserve, 0, [3]) != stand_ins(reserve, 1, [3])


@given(st.sets(st.integers(0, 49), max_size=49), st.integers(0, 3))
def test_an_excluded_row_never_stands_in(excluded: set[int], epoch: int) -> None:
    reserve = Reserve(2000, 50, 1)
    forbidden = reserve.rows[sorted(excluded)].tolist()
    reserve.learn(None, [RangeSet([(row, row + 1) for row in forbidden])])
    assert reserve.usable == 50 - len(excluded)
    assert not set(stand_ins(reserve, epoch, list(range(200)))) & set(forbidden)


def test_a_row_of_another_shard_stands_in_while_there_is_one() -> None:
    shards = Shards([("a", 0, 900), ("b", 900, 1000)], 1000)
    reserve = Reserve(1000, 40, 5)
    reserve.learn(shards, [])
    assert set(shards.of(reserve.rows).tolist()) == {0, 1}
    rows = np.array(stand_ins(reserve, 0, list(range(300)), shard=0))
    assert set(shards.of(rows).tolist()) == {1}
    alone = Reserve(1000, 40, 5)
    alone.learn(Shards([("all", 0, 1000)], 1000), [])
    assert len(stand_ins(alone, 0, [1, 2], shard=0)) == 2


def test_an_empty_reserve_says_so() -> None:
    reserve = Reserve(100, 0, 1)
    assert not reserve.usable
    with pytest.raises(ValueError):
        stand_ins(reserve, 0, [1])
