from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from trainwarden.exporter.loader.batches import MOST_SHARDS, Batch, Batches, Share
from trainwarden.exporter.loader.order import make_order
from trainwarden.exporter.loader.ranges import RangeSet
from trainwarden.exporter.loader.shards import Shards
from trainwarden.exporter.loader.skips import Skip, Skips
from trainwarden.record import Ranges

ROWS = 240
SHARDS = [(f"s{number}", 40 * number, 40 * number + 40) for number in range(6)]


def batches(
    share: Share,
    skips: Skips | None = None,
    excluded: dict[str, Ranges] | None = None,
    order: str = "blocks",
    reserve: float = 0.1,
) -> Batches:
    shards = Shards(SHARDS, ROWS)
    made, held_back = make_order(order, ROWS, shards=shards, seed=3, share=reserve, batch=1)
    rows = {mode: RangeSet(ranges) for mode, ranges in (excluded or {}).items()}
    return Batches(made, held_back, shards, skips or Skips(), rows, share)  # type: ignore[arg-type]


def run(made: Batches, epoch: int = 0, position: int = 0) -> list[Batch]:
    return list(made.begin(epoch, position))


def positions(cut: Batch) -> list[int]:
    return [position for first, end in cut.samples for position in range(first, end)]


ranges = st.lists(
    st.tuples(st.integers(0, 210), st.integers(1, 40)).map(lambda pair: (pair[0], pair[0] + pair[1])),
    min_size=1,
    max_size=3,
)
sizes = st.integers(1, 17)
modes = st.sampled_from(["substitute", "shift"])


@given(sizes, ranges)
def test_substitution_leaves_every_other_position_as_it_was(size: int, skipped: Ranges) -> None:
    plain = run(batches(Share(size)))
    patched = run(batches(Share(size), Skips((Skip(0, skipped),))))
    meant = RangeSet(skipped)
    assert [cut.samples for cut in patched] == [cut.samples for cut in plain]
    for before, after in zip(plain, patched, strict=True):
        touched = meant.holds(np.array(positions(before)))
        assert after.substituted == touched.sum()
        for row_before, row_after, is_touched in zip(before.rows, after.rows, touched, strict=True):
            assert (row_before != row_after) == bool(is_touched)


@given(sizes, ranges, ranges)
def test_two_runs_that_skip_different_positions_agree_where_both_do(size: int, some: Ranges, more: Ranges) -> None:
    one = run(batches(Share(size), Skips((Skip(0, some),))))
    other = run(batches(Share(size), Skips((Skip(0, some), Skip(0, more)))))
    only_more = RangeSet(more).holds(np.arange(ROWS)) & ~RangeSet(some).holds(np.arange(ROWS))
    for first, second in zip(one, other, strict=True):
        for position, row, other_row in zip(positions(first), first.rows, second.rows, strict=True):
            assert row == other_row or only_more[position]


@given(sizes, ranges)
def test_shifting_moves_what_follows_forward_and_loses_nothing_else(size: int, skipped: Ranges) -> None:
    meant = RangeSet(skipped)
    plain = [
        (position, row)
        for cut in run(batches(Share(1)))
        for position, row in zip(positions(cut), cut.rows, strict=True)
    ]
    made = batches(Share(size), Skips((Skip(0, skipped, "shift"),)))
    shifted = run(made)
    found = [(position, row) for cut in shifted for position, row in zip(positions(cut), cut.rows, strict=True)]
    assert found == [pair for pair in plain if not meant.holds(np.array([pair[0]]))[0]]
    assert all(len(cut.rows) == size for cut in shifted[:-1])
    assert made.count(0) == len(shifted)


@given(sizes, modes, st.integers(0, 200), st.integers(1, 60), st.integers(0, 2), ranges)
def test_an_excluded_row_comes_in_no_epoch(
    size: int, mode: str, first: int, length: int, epoch: int, skipped: Ranges
) -> None:
    excluded = [(first, min(first + length, ROWS))]
    made = batches(Share(size), Skips((Skip(epoch, skipped, "shift"),)), {mode: excluded})
    found = run(made, epoch)
    assert not any(RangeSet(excluded).holds(np.array(cut.rows)).any() for cut in found)
    assert made.count(epoch) == len(found)


@given(sizes, ranges, modes, st.data())
def test_going_on_from_any_batch_gives_the_same_rest(
    size: int, skipped: Ranges, mode: str, data: st.DataObject
) -> None:
    made = batches(Share(size), Skips((Skip(0, skipped, mode),)))  # type: ignore[arg-type]
    whole = run(made)
    assume(whole)
    at = data.draw(st.integers(0, len(whole) - 1))
    assert run(made, 0, whole[at].end) == whole[at + 1 :]


@given(sizes, st.integers(1, 5), st.booleans(), st.booleans(), ranges)
def test_ranks_share_each_step_and_have_equally_many(
    size: int, world: int, drop_last: bool, drop_uneven: bool, skipped: Ranges
) -> None:
    skips = Skips((Skip(0, skipped, "shift"),))
    made = [batches(Share(size, rank, world, drop_last, drop_uneven), skips) for rank in range(world)]
    cuts = [run(each) for each in made]
    assert {len(each) for each in cuts} == {made[0].count(0)}
    alone = {position for cut in run(batches(Share(1), skips)) for position in positions(cut)}
    seen: list[int] = []
    for step in zip(*cuts, strict=True):
        assert len({len(cut.rows) for cut in step}) == 1
        assert len({cut.end for cut in step}) == 1
        seen += [position for cut in step for position in positions(cut)]
    assert set(seen) <= alone
    if not drop_last and not drop_uneven:
        assert set(seen) == alone
    if drop_uneven:
        assert len(seen) == len(set(seen))


def test_another_world_size_goes_on_at_the_same_global_position() -> None:
    two = [run(batches(Share(8, rank, 2))) for rank in range(2)]
    after = two[0][4].end
    seen = [row for step in range(5) for rank in range(2) for row in two[rank][step].rows]
    four = [run(batches(Share(4, rank, 4)), 0, after) for rank in range(4)]
    seen += [row for step in zip(*four, strict=True) for cut in step for row in cut.rows]
    assert sorted(seen) == sorted(row for cut in run(batches(Share(8))) for row in cut.rows)


def test_a_batch_names_the_shards_that_it_drew_from_and_their_extents() -> None:
    found = run(batches(Share(16)))
    extents = {span.name: (span.first, span.end) for cut in found for span in cut.shards}
    assert sorted(extents) == [name for name, _, _ in SHARDS]
    covered = sorted(extents.values())
    assert covered[0][0] == 0
    assert all(before[1] == after[0] for before, after in pairwise(covered))
    for cut in found:
        for span in cut.shards:
            assert (span.first, span.end) == extents[span.name]


def test_a_shuffled_order_gives_the_smallest_range_of_the_batch_in_each_shard() -> None:
    cut = run(batches(Share(16), order="shuffle"))[2]
    shards = Shards(SHARDS, ROWS)
    for span in cut.shards:
        here = [
            position
            for position, row in zip(positions(cut), cut.rows, strict=True)
            if shards.all[int(shards.of(np.array([row]))[0])].name == span.name
        ]
        assert (span.first, span.end) == (min(here), max(here) + 1)


def test_a_batch_from_very_many_shards_names_none() -> None:
    shards = Shards([(f"s{row}", row, row + 1) for row in range(ROWS)], ROWS)
    order, reserve = make_order("shuffle", ROWS, shards=shards, seed=3, share=0.1, batch=1)

    def spans(size: int) -> int:
        made = Batches(order, reserve, shards, Skips(), {}, Share(size))
        return len(next(made.begin(0, 0)).shards)

    assert (spans(MOST_SHARDS), spans(MOST_SHARDS + 1)) == (MOST_SHARDS, 0)


def test_what_was_substituted_names_no_shard() -> None:
    cut = run(batches(Share(16), Skips((Skip(0, [(16, 32)]),))))[1]
    assert (cut.substituted, cut.shards) == (16, [])


@pytest.mark.parametrize("reserve", [0.0, 0.1])
def test_without_a_usable_reserve_skipped_positions_are_shifted(reserve: float) -> None:
    excluded = None if not reserve else {"substitute": [(0, ROWS - 40)]}
    made = batches(Share(8), Skips((Skip(0, [(0, 16)]),)), excluded, reserve=reserve)
    if not reserve:
        assert not made.can_substitute
        assert run(made)[0].samples == [(16, 24)]
    else:
        assert made.can_substitute
