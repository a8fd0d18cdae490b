from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from trainwarden.exporter.loader.permutation import Permutation
from trainwarden.orderkey import key


@given(st.integers(1, 3000), st.integers(-(2**70), 2**70))
def test_every_value_comes_exactly_once(size: int, seed: int) -> None:
    assert np.array_equal(np.sort(Permutation(size, key(seed))(np.arange(size))), np.arange(size))


def test_a_value_does_not_depend_on_what_else_is_asked_for() -> None:
    shuffle = Permutation(10**12, key(7))
    together = shuffle(np.array([5, 10**11, 999_999_999_999]))
    assert [int(shuffle(np.array([at]))[0]) for at in (5, 10**11, 999_999_999_999)] == together.tolist()


def test_the_order_is_fixed_for_good() -> None:
    # A checkpoint of an earlier release is resumed in the order of that release: these numbers must never change.
    assert Permutation(10, key(0, 0))(np.arange(10)).tolist() == [7, 6, 3, 0, 9, 4, 5, 2, 8, 1]
    assert key(1, 2, 3) == 14605187622988859405


@pytest.mark.parametrize("size", [3, 8, 33])
def test_each_value_is_as_likely_at_each_position(size: int) -> None:
    trials = 3000
    seen = np.zeros((size, size))
    for number in range(trials):
        seen[np.arange(size), Permutation(size, key(11, number))(np.arange(size))] += 1
    expected = trials / size
    freedom = (size - 1) ** 2
    chi_squared = float(((seen - expected) ** 2 / expected).sum())
    assert chi_squared < freedom + 6 * np.sqrt(2 * freedom)


def test_neighbours_and_epochs_are_unrelated() -> None:
    first, second = (Permutation(100_000, key(3, epoch))(np.arange(100_000)) for epoch in (0, 1))
    assert abs(np.corrcoef(first[:-1], first[1:])[0, 1]) < 0.02
    assert abs(np.corrcoef(first, second)[0, 1]) < 0.02


def test_a_position_outside_is_an_error() -> None:
    with pytest.raises(IndexError):
        Permutation(5, 0)(np.array([5]))
    with pytest.raises(ValueError):
        Permutation(0, 0)
