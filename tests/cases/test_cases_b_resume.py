"""Case B05: steps that go backwards are a new attempt; what was made twice is compared and never averaged."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.cases.build import Verdicts, play
from tests.cases.registry import case
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


@case("B05")
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


@case("B05")
def test_b05_what_was_made_twice_with_other_data_is_said_and_alerts_nobody(tmp_path: Path) -> None:
    found = written(tmp_path, losses(1, 212, 0) + losses(201, 500, 1))
    assert found.incidents == []
    (twice,) = [one for one in found.notices if one["kind"] == "steps_repeated"]
    assert "not the same numbers" in twice["says"]


@case("B05")
def test_b05_a_divergence_behind_a_step_back_is_seen(tmp_path: Path) -> None:
    rows = losses(1, 212, 0) + losses(201, 500, 1)
    for row in rows[212 + 150 :]:
        row["loss"] += 2.0
    (incident,) = written(tmp_path, rows).pages
    assert (incident["attempt"], incident["onset_step"]) == (1, 351)


@case("B05")
@pytest.mark.parametrize("first", [0, 1])
def test_b05_a_counter_that_was_reset_goes_on_from_nothing_that_can_be_compared(tmp_path: Path, first: int) -> None:
    again = [{**row, "lr": 6e-4} for row in losses(first, 300, 1)]
    found = written(tmp_path, losses(1, 212, 0) + again)
    assert found.incidents == []
    assert "steps_repeated" not in found.kinds


# -- the same rules on logs of other programs, which bring no events -------------------------------------------------


def table(folder: Path, rows: list[dict[str, Any]]) -> Verdicts:
    path = folder / "log.csv"
    names = list(rows[0])
    text = [
        ",".join(names),
        *(",".join("" if row.get(name) is None else repr(row[name]) for name in names) for row in rows),
    ]
    path.write_text("\n".join(text) + "\n")
    return play(placed_of(path)[0])


@case("A06")
def test_a06_in_a_table_without_events_is_found_at_the_first_step_of_the_second_attempt(tmp_path: Path) -> None:
    again = [{**row, "lr": 3e-4 * (row["step"] - 200) / 1000} for row in losses(201, 500, 1)]
    (page,) = table(tmp_path, losses(1, 212, 0) + again).pages
    assert (page["attempt"], page["opened_step"], page["verdict"]) == (1, 201, "mismatch")
    assert page["cause"]["name"] == "learning_rate"
    assert page["action"] == "escalate"


@case("A09")
def test_a09_in_a_table_without_events_is_a_matter_of_the_data(tmp_path: Path) -> None:
    chance = np.random.default_rng(3)

    def row(step: int, level: float) -> dict[str, Any]:
        return {"step": step, "loss": level + 0.01 * float(chance.normal()), "epoch": round(step / 1632, 4)}

    rows = [row(step, 0.20) for step in range(1700, 2541)] + [row(step, 0.16) for step in range(2449, 3000)]
    (fault,) = table(tmp_path, rows).told
    assert 2449 <= fault["onset_step"] <= 2468
    assert (fault["verdict"], fault["cause"]["name"], fault["action"]) == ("mismatch", "data", "none")


@case("A21")
def test_a21_as_lines_of_offsets_is_found_at_the_second_resume(tmp_path: Path) -> None:
    # Checkpoints at steps 30 and 40, each with two more steps behind it.
    parts = [(1, 32, 0), (31, 42, 30), (41, 90, 10)]
    rows = [
        {"step": step, "epoch": 0, "sample_position": at + step - first + 1, "loss": 2.0 + 0.01 * math.sin(step * step)}
        for first, last, at in parts
        for step in range(first, last + 1)
    ]
    faults = written(tmp_path, rows).told
    assert [(one["attempt"], one["severity"], one["verdict"], one["cause"]["name"]) for one in faults] == [
        (2, "warning", "mismatch", "data")
    ]
