from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.rules.language.streams import close, column, values_of

numbers = st.lists(st.one_of(st.integers(-3, 3).map(float), st.floats(-1e6, 1e6)), min_size=1, max_size=40)


@settings(max_examples=40)
@given(numbers, st.integers(1, 9), st.integers(0, 3), st.floats(0, 1))
def test_order_statistics_are_numpys(given_: list[float], steps: int, offset: int, share: float) -> None:
    for text, reckon in (
        ("median({})", np.median),
        ("mad({})", lambda w: np.median(np.abs(w - np.median(w)))),
        ("min({})", np.min),
        ("max({})", np.max),
        (f"quantile({{}}, q={share:.6f})", lambda w: np.quantile(w, float(f"{share:.6f}"))),
    ):
        found = values_of(text.format(f"x[{steps}] offset {offset}"), column(given_))
        for row, value in enumerate(found):
            window = np.array(given_[max(0, row - offset - steps + 1) : max(0, row - offset + 1)])
            if 5 * len(window) >= steps:
                assert close(value, float(reckon(window))), (text, row)
            else:
                assert value is None


def test_a_quantile_at_its_ends() -> None:
    steps = column([3.0, 1.0, 2.0])
    assert values_of("quantile(x[3], 0)", steps)[-1] == 1.0
    assert values_of("quantile(x[3], q=1)", steps)[-1] == 3.0
