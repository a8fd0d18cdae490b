from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.rules.language.streams import column, pack_of, run, same, values_of
from trainwarden.record import Step
from trainwarden.rules.core.language.operators.repetition import MOST


def batches(period: int | None, length: int, seed: int = 0, at: int = 0) -> list[Step]:
    """Return hashes of batches that come again every ``period`` steps from step ``at`` on."""
    hashes = np.random.default_rng(seed).integers(0, 2**32, size=length).astype(float).tolist()
    for place in range(at + (period or length), length):
        hashes[place] = hashes[place - (period or 0)]
    return column(hashes)


@pytest.mark.parametrize("period", [1, 7, 100, 1000, 5000])
def test_batches_that_come_again_have_their_distance_and_new_ones_none(period: int) -> None:
    values = values_of("repeats(x)", batches(period, 3 * period + 600))
    assert set(values[:period]) == {0.0}
    assert values[-1] == period
    first = next(place for place, value in enumerate(values) if value)
    assert period + 19 <= first <= period + 250
    assert set(values[first:]) == {float(period)}


def test_new_batches_are_never_called_repeated() -> None:
    assert set(values_of("repeats(x)", batches(None, 20_000))) == {0.0}


def test_chance_repetitions_at_other_distances_are_none() -> None:
    rng = np.random.default_rng(0)
    assert set(values_of("repeats(x, least=3)", column(rng.integers(0, 400, size=2000).astype(float).tolist()))) == {
        0.0
    }


def test_what_is_farther_away_than_the_window_is_new() -> None:
    assert values_of("repeats(x, window=900)", batches(1000, 3000))[-1] == 0.0
    assert values_of("repeats(x, window=1000)", batches(1000, 3000))[-1] == 1000.0


def test_a_new_batch_ends_it() -> None:
    steps = [*batches(50, 300), *column(range(1000, 1010), first=301)]
    assert values_of("repeats(x)", steps)[299:301] == [50.0, 0.0]


def test_it_takes_as_many_in_a_row_as_are_asked_for() -> None:
    values = values_of("repeats(x, least=30)", batches(40, 120))
    assert values[40 + 28] == 0.0
    assert values[40 + 30] == 40.0


@settings(max_examples=20, deadline=None)
@given(st.lists(st.integers(0, 3 * MOST), max_size=6), st.sampled_from([30, 700, 1300]))
def test_any_cut_and_a_restart_anywhere_give_the_same(places: list[int], period: int) -> None:
    pack = pack_of("repeats(x) > 0")
    steps = batches(period, 4 * MOST)
    assert same(run(pack, steps), run(pack, steps, places[::2], places[1::2]))
    assert run(pack, steps)
