"""Fewer points, the same picture."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from trainwarden.rules.report.thinning import thin


@given(st.lists(st.tuples(st.integers(0, 20), st.floats(-1e6, 1e6)), max_size=200))
def test_each_column_keeps_its_ends_and_its_extremes_in_order(points: list[tuple[int, float]]) -> None:
    points.sort(key=lambda point: point[0])
    columns = np.array([column for column, _ in points], dtype=np.int64)
    values = np.array([value for _, value in points])
    kept = thin(columns, values)
    assert (np.diff(kept) > 0).all()
    for column in set(columns.tolist()):
        inside = np.flatnonzero(columns == column)
        chosen = [place for place in kept.tolist() if columns[place] == column]
        assert len(chosen) <= 4
        assert {int(inside[0]), int(inside[-1])} <= set(chosen)
        assert values[chosen].min() == values[inside].min()
        assert values[chosen].max() == values[inside].max()
