"""What a GradScaler skipped is said in one notice a start, brought up to date as it doubles, however the records are cut."""

from __future__ import annotations

from typing import Any

import pytest

from trainwarden.record import Step
from trainwarden.rules.core.block import from_steps
from trainwarden.rules.core.instrument import Watch
from trainwarden.rules.core.scaler_skips import look


def told(
    skips: dict[int, float], size: int, scaler: bool = True, stride: int = 1, last: int = 40
) -> list[tuple[int, str]]:
    made = []
    for step in range(stride, last + 1, stride):
        signals: dict[str, Any] = {"loss": 2.0, "skipped": skips.get(step, 0.0)}
        made.append(
            Step(
                seq=step,
                step=step,
                time=float(step),
                stride=stride,
                signals=signals | ({"loss_scale": 1024.0} if scaler else {}),
            )
        )
    watches: dict[str, Watch] = {}
    found = [look(watches, from_steps(made[first : first + size], None)) for first in range(0, len(made), size)]
    return [one for one in found if one is not None]


@pytest.mark.parametrize("size", [1, 7, 40])
def test_the_last_word_is_the_same_however_records_are_cut(size: int) -> None:
    step, says = told({5: 1.0, 9: 1.0, 20: 1.0}, size)[-1]
    assert step == 5
    assert says.startswith("The GradScaler skipped 2 steps between steps 5 and 9")


def test_a_record_of_several_steps_counts_them_and_no_more() -> None:
    assert told({10: 4.0, 20: 99.0}, 40, stride=10)[-1][1].startswith(
        "The GradScaler skipped 14 steps between steps 10 and 20"
    )


def test_without_a_scaler_or_a_skip_nothing_is_said() -> None:
    assert told({5: 1.0}, 7, scaler=False) == []
    assert told({}, 7) == []
