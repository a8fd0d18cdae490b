from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from trainwarden.exporter.loader import ranges as algebra
from trainwarden.plan import merge_ranges
from trainwarden.record import Ranges

spans = st.tuples(st.integers(0, 60), st.integers(1, 12)).map(lambda pair: (pair[0], pair[0] + pair[1]))
some = st.lists(spans, max_size=6)


def members(ranges: Ranges) -> set[int]:
    return {position for first, end in ranges for position in range(first, end)}


@given(st.lists(st.integers(0, 80), max_size=40))
def test_ranges_of_positions_hold_exactly_them(positions: list[int]) -> None:
    found = algebra.of_positions(np.array(positions, dtype=np.int64))
    assert members(found) == set(positions)
    assert found == merge_ranges(found)


@given(some, spans)
def test_a_set_answers_as_its_members_do(ranges: Ranges, window: tuple[int, int]) -> None:
    held = algebra.RangeSet(ranges)
    positions = np.arange(80)
    assert positions[held.holds(positions)].tolist() == sorted(members(ranges))
    assert held.touches(*window) == bool(members(ranges) & members([window]))
    assert bool(held) == bool(members(ranges))
