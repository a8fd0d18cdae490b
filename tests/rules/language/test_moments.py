from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.rules.language.streams import close, column, values_of


@settings(max_examples=40)
@given(st.lists(st.floats(-1e3, 1e3), min_size=2, max_size=40), st.integers(2, 9))
def test_mean_and_stddev_are_numpys(given_: list[float], steps: int) -> None:
    means, deviations = (values_of(f"{name}(x[{steps}])", column(given_)) for name in ("mean", "stddev"))
    for row in range(1, len(given_)):
        window = np.array(given_[max(0, row - steps + 1) : row + 1])
        assert close(means[row], float(window.mean()))
        assert abs(deviations[row] - float(window.std(ddof=1))) <= 1e-9 * 1e3


def test_the_deviation_of_equal_values_is_exactly_zero_and_of_one_value_unknown() -> None:
    assert values_of("stddev(x[5])", column([0.1] * 4)) == [None, 0.0, 0.0, 0.0]
