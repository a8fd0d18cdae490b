"""Steps that go backwards within one start are left out, and that is said."""

from __future__ import annotations

from typing import Any

import pytest

from tests.rules.core.runs import small_pack
from trainwarden.record import Step
from trainwarden.rules.core.effects import Save
from trainwarden.rules.core.feed import dump, feed, load, new_state
from trainwarden.rules.core.inputs import Start, Steps
from trainwarden.rules.core.settings import Settings

START = Start("u", "r", 0, "s")
ORDER = [*range(1, 101), *range(40, 90), *range(101, 151), 150, *range(151, 161)]


def fed(size: int, *, stored: bool = False) -> dict[str, dict[str, Any]]:
    state = new_state(Settings(), small_pack())
    records = [Step(seq=n, step=step, time=float(n), signals={"loss": 2.0 + n % 7}) for n, step in enumerate(ORDER, 1)]
    saved: dict[str, dict[str, Any]] = {}
    for first in range(0, len(records), size):
        for effect in feed(state, Steps(START, 0, tuple(records[first : first + size]))):
            if isinstance(effect, Save) and effect.kind == "notice":
                saved[effect.key] = effect.row
        if stored:
            state = load(dump(state), Settings(), small_pack())
    return saved


@pytest.mark.parametrize("size", [1, 7, 1000])
@pytest.mark.parametrize("stored", [False, True])
def test_a_start_whose_steps_go_backwards_has_one_notice_that_says_so(size: int, stored: bool) -> None:
    (row,) = [row for row in fed(size, stored=stored).values() if row["kind"] == "unordered"]
    assert row["step"] == 40
    # Said again whenever twice as many were left out: 1, 2, 4 … 32 of 51.
    assert row["says"] == "Rank 0: step 71 came after step 100 of the same start: it is left out, as 31 before it."


def test_steps_that_only_grow_have_none() -> None:
    state = new_state(Settings(), small_pack())
    records = tuple(Step(seq=n, step=n * 3, time=float(n), signals={"loss": 2.0 + n % 7}) for n in range(1, 200))
    assert not [one for one in feed(state, Steps(START, 0, records)) if isinstance(one, Save)]
