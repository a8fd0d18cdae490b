"""Case B05: steps that go backwards are a new attempt; what was made twice is compared and never averaged."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.cases.build import Verdicts, play
from tests.rules.replay.logs import placed_of


def written(folder: Path, rows: list[dict[str, Any]]) -> Verdicts:
    path = folder / "log.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return play(placed_of(path)[0])


def losses(first: int, last: int, seed: int, same_until: int = 0) -> list[dict[str, Any]]:
    """Rows of a run whose data order was restored: up to ``same_until`` the losses are those of seed 0, but for a rounding."""
    rows = []
    for step in range(first, last + 1):
        chance = np.random.default_rng((0 if step <= same_until else seed, step))
        loss = 2 + 3 * math.exp(-step / 80) + 0.03 * float(chance.normal())
        rows.append({"step": step, "loss": loss + (0.0011 if step == 207 and seed else 0.0), "lr": 3e-4})
    return rows


def test_b05_steps_that_go_backwards_are_an_attempt_and_what_was_made_twice_is_compared(tmp_path: Path) -> None:
    found = written(tmp_path, losses(1, 212, 0) + losses(201, 500, 1, same_until=212))
    assert found.incidents == []
    (resume,) = [one for one in found.notices if one["kind"] == "resume"]
    assert (resume["attempt"], resume["step"]) == (1, 200)
    (twice,) = [one for one in found.notices if one["kind"] == "steps_repeated"]
    assert twice["step"] == 212
    assert twice["says"].startswith(
        "12 steps from 201 to 212 were made again: their losses differ by at most 0.0011 (at step 207)"
    )
    assert "the state and the data of the first time" in twice["says"]


def test_b05_what_was_made_twice_with_other_data_is_said_and_alerts_nobody(tmp_path: Path) -> None:
    found = written(tmp_path, losses(1, 212, 0) + losses(201, 500, 1))
    assert found.incidents == []
    (twice,) = [one for one in found.notices if one["kind"] == "steps_repeated"]
    assert "not the same numbers" in twice["says"]


def test_b05_a_divergence_behind_a_step_back_is_seen(tmp_path: Path) -> None:
    rows = losses(1, 212, 0) + losses(201, 500, 1)
    for row in rows[212 + 150 :]:
        row["loss"] += 2.0
    (incident,) = written(tmp_path, rows).pages
    assert (incident["attempt"], incident["onset_step"]) == (1, 351)


@pytest.mark.parametrize("first", [0, 1])
def test_b05_a_counter_that_was_reset_goes_on_from_nothing_that_can_be_compared(tmp_path: Path, first: int) -> None:
    again = [{**row, "lr": 6e-4} for row in losses(first, 300, 1)]
    found = written(tmp_path, losses(1, 212, 0) + again)
    assert found.incidents == []
    assert "steps_repeated" not in found.kinds
