"""What the batches behind a start are made of: for any cut, and bounded."""

from __future__ import annotations

import numpy as np
import pytest

from tests.rules.language.streams import record
from trainwarden.rules.core.block import from_steps
from trainwarden.rules.core.makeup import MOST, Makeup, after, look, moved


def start(usual: Makeup, begins: float, cut: int, seed: int = 0) -> Makeup:
    rng = np.random.default_rng(seed)
    steps = [
        record(step, ratio=(begins if step <= 30 else 1.0) + 0.01 * float(rng.normal()), loss=2.0, length=512.0)
        for step in range(1, 201)
    ]
    made = after(usual)
    for first in range(0, 200, cut):
        look(made, from_steps(steps[first : first + cut]))
    return made


@pytest.mark.parametrize("cut", [1, 7, 200])
def test_a_signal_that_begins_otherwise_has_moved_however_the_records_are_cut(cut: int) -> None:
    first = start(Makeup(), 0.6, cut)
    assert moved(first, 30) == ()
    (found,) = moved(start(first, 0.6, cut, seed=1), 30)
    assert moved(start(first, 0.6, cut, seed=1), 9) == ()
    assert found.name == "ratio"
    assert found.early == pytest.approx(0.6, abs=0.01)
    assert found.usual == pytest.approx(1.0, abs=0.01)
    assert start(first, 0.6, cut, seed=1) == start(first, 0.6, 50, seed=1)


def test_one_that_begins_as_it_was_has_not() -> None:
    assert moved(start(start(Makeup(), 1.0, 50), 1.0, 50, seed=1), 30) == ()


def test_a_start_that_was_short_leaves_what_was_usual_before_it() -> None:
    first = start(Makeup(), 1.0, 50)
    short = after(first)
    look(short, from_steps([record(1, ratio=0.6)]))
    assert after(short).usual == first.settled


def test_a_few_signals_are_followed() -> None:
    made = Makeup()
    look(made, from_steps([record(step, **{f"own_{place}": 1.0 for place in range(30)}) for step in range(1, 100)]))
    assert len(made.early) == len(made.settled) == MOST
