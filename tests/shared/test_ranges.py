"""Ranges are sets of positions, whatever their order, overlaps and gaps."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from trainwarden import ranges as algebra
from trainwarden.plan import merge_ranges
from trainwarden.record import Ranges

spans = st.tuples(st.integers(0, 60), st.integers(1, 12)).map(lambda pair: (pair[0], pair[0] + pair[1]))
some = st.lists(spans, max_size=6)


def members(ranges: Ranges) -> set[int]:
    return {position for first, end in ranges for position in range(first, end)}


@given(some, some)
def test_without_is_the_difference(ranges: Ranges, removed: Ranges) -> None:
    found = algebra.without(ranges, removed)
    assert members(found) == members(ranges) - members(removed)
    assert all(first < end for first, end in found)
    assert found == merge_ranges(found)


@given(some, spans)
def test_within_is_the_intersection(ranges: Ranges, window: tuple[int, int]) -> None:
    found = algebra.within(ranges, *window)
    assert members(found) == members(ranges) & members([window])
    assert algebra.length(found) == len(members(found))


@given(some, some)
def test_shared_is_the_intersection(one: Ranges, other: Ranges) -> None:
    found = algebra.shared(one, other)
    assert members(found) == members(one) & members(other)
    assert found == merge_ranges(found)
