from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from trainwarden.exporter.loader.order import Order, make_order
from trainwarden.exporter.loader.ranges import RangeSet
from trainwarden.exporter.loader.reserve import Reserve
from trainwarden.exporter.loader.shards import Shards


def whole(order: Order, epoch: int) -> list[int]:
    return order.rows(epoch, np.arange(order.size(epoch))).tolist()


def made(
    order: object, rows: int, shards: Shards | None = None, seed: int = 0, share: float = 0.1
) -> tuple[Order, Reserve]:
    return make_order(order, rows, shards=shards, seed=seed, share=share, batch=1)  # type: ignore[arg-type]


cuts = st.lists(st.integers(1, 60), min_size=1, max_size=8)


def cut(sizes: list[int]) -> Shards:
    ends = np.cumsum(sizes).tolist()
    return Shards(
        [(f"s{number}", end - size, end) for number, (size, end) in enumerate(zip(sizes, ends, strict=True))], ends[-1]
    )


@given(st.sampled_from(["sequential", "shuffle", "blocks"]), cuts, st.integers(0, 3), st.integers(0, 99))
def test_an_epoch_holds_every_row_once_but_the_reserve(name: str, sizes: list[int], epoch: int, seed: int) -> None:
    rows = sum(sizes)
    order, reserve = made(name, rows, cut(sizes), seed)
    assert sorted(whole(order, epoch) + reserve.rows.tolist()) == list(range(rows))
    assert order.size(epoch) == rows - len(reserve)


@given(st.sampled_from(["sequential", "shuffle", "blocks"]), cuts, st.data())
def test_a_row_is_a_function_of_seed_epoch_and_position_alone(name: str, sizes: list[int], data: st.DataObject) -> None:
    order, _ = made(name, sum(sizes), cut(sizes), 4)
    other, _ = made(name, sum(sizes), cut(sizes), 4)
    all_rows = whole(order, 1)
    at = data.draw(st.lists(st.integers(0, len(all_rows) - 1), max_size=10))
    assert other.rows(1, np.array(at, dtype=np.int64)).tolist() == [all_rows[position] for position in at]


@given(cuts, st.integers(0, 3))
def test_blocks_read_one_shard_after_the_other(sizes: list[int], epoch: int) -> None:
    shards = cut(sizes)
    order, _ = made("blocks", sum(sizes), shards, 2)
    positions_of: list[list[int]] = [[] for _ in sizes]
    for position, row in enumerate(whole(order, epoch)):
        positions_of[int(shards.of(np.array([row]))[0])].append(position)
    for number, positions in enumerate(positions_of):
        extent = order.extent(epoch, number)
        assert (extent is None) == (not positions)
        if extent is not None:
            assert positions == list(range(*extent))


def test_sequential_is_ascending_and_its_shards_have_extents() -> None:
    shards = cut([30, 50, 20])
    order, reserve = made("sequential", 100, shards)
    rows = whole(order, 7)
    assert rows == sorted(rows)
    first, end = order.extent(0, 1) or (0, 0)
    assert rows[first:end] == [row for row in range(30, 80) if row not in reserve.rows]


def test_shuffle_differs_by_epoch_and_seed_and_has_no_extents() -> None:
    order, _ = made("shuffle", 200, cut([100, 100]))
    other, _ = made("shuffle", 200, cut([100, 100]), seed=1)
    assert whole(order, 0) != whole(order, 1)
    assert whole(order, 0) != whole(other, 0)
    assert order.extent(0, 0) is None


def test_the_order_of_an_earlier_release_is_kept() -> None:
    order, _ = make_order("shuffle", 1000, shards=None, seed=5, share=0.01, batch=4)
    assert order.rows(2, np.arange(5)).tolist() == [638, 221, 217, 313, 394]


def test_a_long_order_costs_no_memory() -> None:
    order, reserve = make_order("shuffle", 10**11, shards=None, seed=1, share=1e-8, batch=1)
    rows = order.rows(3, np.array([0, 10**10, 5 * 10**10]))
    assert len(reserve) == 1000
    assert len(set(rows.tolist())) == 3
    assert rows.max() < 10**11


def test_blocks_leave_rows_outside_of_every_shard_alone() -> None:
    shards = Shards([("a", 10, 20), ("b", 50, 90)], 100)
    order, reserve = made("blocks", 100, shards)
    assert sorted(whole(order, 0) + reserve.rows.tolist()) == [*range(10, 20), *range(50, 90)]


def test_a_function_gives_the_order_and_its_reserve_comes_from_its_rows() -> None:
    def every_second(seed: int, epoch: int) -> list[int]:
        return list(range(epoch, 100, 2))

    order, reserve = made(every_second, 100)
    assert all(row % 2 == 0 for row in reserve.rows)
    assert whole(order, 0) == [row for row in range(0, 100, 2) if row not in reserve.rows]
    assert whole(order, 1) == list(range(1, 100, 2))
    assert order.count(0, RangeSet([(0, 10)])) == sum(row < 10 for row in whole(order, 0))


def test_a_functions_shards_have_extents_where_it_reads_them_in_one_go() -> None:
    shards = cut([10, 10, 10])
    rows = [*range(20, 30), *range(5), *range(10, 20), *range(5, 10)]
    order, _ = made(lambda seed, epoch: rows, 30, shards, share=0.0)
    assert order.extent(0, 2) == (0, 10)
    assert order.extent(0, 1) == (15, 25)
    assert order.extent(0, 0) is None


@given(st.sampled_from(["sequential", "blocks"]), cuts, st.integers(0, 100), st.integers(1, 100))
def test_counting_rows_agrees_with_looking(name: str, sizes: list[int], first: int, length: int) -> None:
    order, _ = made(name, sum(sizes), cut(sizes))
    asked = RangeSet([(min(first, sum(sizes)), min(first + length, sum(sizes)))])
    assert order.count(2, asked) == int(np.count_nonzero(asked.holds(np.array(whole(order, 2)))))


@pytest.mark.parametrize(
    ("order", "says"),
    [
        ("random", "order: 'random' is none of"),
        ("blocks", "order: blocks need shards"),
        (lambda seed, epoch: [0.5], "must return a non-empty one-dimensional array of row numbers"),
        (lambda seed, epoch: [7, 100], "rows 7 to 100"),
    ],
)
def test_an_order_of_no_use_is_refused_by_name(order: object, says: str) -> None:
    with pytest.raises(ValueError, match=says):
        made(order, 100)
