"""Cases of category a behind a resume, with all that the case requires: as journals and tables that the public command replays."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.cases.build import Row, lines_of, rows
from tests.cases.build_files import journal, lines, replayed, table
from tests.cases.registry import case
from trainwarden.record import Event

SEEDS = (0, 1, 2)


def says(incident: dict[str, Any]) -> str:
    return " ".join(one["says"] for one in incident["evidence"])


def checkpoint(step: int) -> tuple[int, str, dict[str, Any]]:
    return step, "checkpoint", {"path": f"c{step}", "complete": True, "finite": True}


#: The rows of the case: loss, loss scale, gradient norm (stale on skipped steps), skipped.
A05 = {
    17060: (2.665295, 1048576, 453082.517, 0),
    17061: (2.667121, 1048576, 464441.887, 0),
    17062: (4.374269, 1048576, 464441.887, 1),
    17063: (4.365822, 524288, 464441.887, 1),
    17064: (4.391485, 262144, 464441.887, 1),
    17065: (4.404639, 131072, 464441.887, 1),
    17066: (4.398458, 131072, 879946.622, 0),
    17067: (4.096038, 65536, 879946.622, 1),
    17068: (4.137348, 32768, 879946.622, 1),
}


def a05(seed: int, resume: int = 17060, scale: float = 1048576.0, last: int = 400) -> list[tuple[int, Row]]:
    """A resume at ``resume`` behind which the optimizer's own counter begins at 1; the rows of the case, then a slow way back."""
    shift = resume - 17060

    def make(step: int, chance: np.random.Generator) -> Row:
        since = step - resume
        loss, norm = 2.667 + 0.02 * float(chance.normal()), 450e3 * math.exp(0.1 * float(chance.normal()))
        now, skipped = scale, 0.0
        if step - shift in A05:
            loss, told, norm, skipped = A05[step - shift]
            now = told * scale / 1048576.0
        elif since > 8:
            loss += 1.4 * math.exp(-since / 40)
            now = scale / 32
        counter = step if since <= 0 else since - min(max(since - 1, 0), 4) - max(0, min(since - 6, 2))
        return {
            "loss": loss,
            "loss_scale": now,
            "grad_norm": norm,
            "lr": 5.948e-5,
            "skipped": float(skipped),
            "optimizer_step": float(counter),
        }

    return rows(resume - 600, resume + last, make, seed=seed)


@case("A05")
@pytest.mark.parametrize(("seed", "resume"), [(0, 17060), (1, 5210)])
@pytest.mark.parametrize("told", ["event", "start", "nothing"])
def test_a05_behind_the_resume_it_is_the_optimizers_state_and_never_a_rollback(
    tmp_path: Path, seed: int, resume: int, told: str
) -> None:
    made = a05(seed, resume)
    saved = [checkpoint(resume - 300), checkpoint(resume)]
    if told == "nothing":
        found = replayed(table(tmp_path / "a05.csv", made))
    elif told == "event":
        found = replayed(journal(tmp_path / "run", lines_of(made, changes=[*saved, (resume, "resume", {})])))
    else:
        parts = [row for row in made if row[0] <= resume], [row for row in made if row[0] > resume]
        found = replayed(journal(tmp_path / "run", lines_of(*parts, changes=saved)))
    first = found.told[0]
    assert resume < first["onset_step"] <= resume + 3
    assert first["opened_step"] <= resume + 5
    assert first["cause"]["name"] == "optimizer_state"
    scores = first["cause"]["scores"]
    assert all(scores["optimizer_state"] > scores.get(name, 0.0) for name in ("numeric", "data"))
    assert f"step counter is 1 at step {resume + 1}" in says(first) or "step counter went back" in says(first)
    assert all(one["action"] in ("none", "escalate") and one["plan"] is None for one in found.incidents)
    stale = [one for one in found.notices if one["kind"] == "repeated_signal" and one["signal"] == "grad_norm"]
    assert stale
    assert resume + 2 <= stale[0]["step"] <= resume + 5
    assert not any(one["verdict"] == "grad_collapse" for one in found.incidents)


def a06(seed: int, at: int, peak: float, warm: int, last: int) -> list[tuple[int, Row]]:
    """The rate ramps up from 0 again over ``warm`` steps; the loss spikes where it passes the old one by far."""

    def make(step: int, chance: np.random.Generator) -> Row:
        since = step - at
        rate = peak if since <= 0 else 3.4 * peak * since / warm
        loss = 1.9 + 0.02 * float(chance.normal()) + (1.5 if since > 0 and rate > 2 * peak else 0.0)
        return {"loss": loss, "lr": rate}

    return rows(at - 1000, at + last, make, seed=seed)


@case("A06")
@pytest.mark.parametrize(
    ("seed", "at", "peak", "warm"), [(0, 29000, 1.77e-5, 2000), (1, 4000, 3e-4, 500), (2, 12000, 6e-5, 3000)]
)
@pytest.mark.parametrize("told", ["event", "start", "nothing"])
def test_a06_a_rate_that_begins_again_from_zero_is_a_page_before_the_loss_moves(
    tmp_path: Path, seed: int, at: int, peak: float, warm: int, told: str
) -> None:
    made = a06(seed, at, peak, warm, int(0.7 * warm))
    saved = [checkpoint(at - 500), checkpoint(at)]
    if told == "nothing":
        found = replayed(table(tmp_path / "a06.csv", made))
    elif told == "event":
        found = replayed(journal(tmp_path / "run", lines_of(made, changes=[*saved, (at, "resume", {})])))
    else:
        parts = [row for row in made if row[0] <= at], [row for row in made if row[0] > at]
        found = replayed(journal(tmp_path / "run", lines_of(*parts, changes=saved)))
    page = found.pages[0]
    assert page["opened_step"] <= at + 5
    assert (page["severity"], page["verdict"]) == ("critical", "mismatch")
    assert page["cause"]["name"] == "learning_rate"
    assert page["cause"]["confidence"] >= 0.6
    assert [one["action"] for one in found.incidents if one["action"] == "rollback"] == []


@case("A06")
@pytest.mark.parametrize("factor", [0.5, 0.8])
def test_a06_a_rate_that_the_plan_changes_is_none_and_one_off_the_plan_is(tmp_path: Path, factor: float) -> None:
    place = {"attempt": 0, "step": 29000, "path": "c29000"}
    plan = {"plan_id": "plan_x", "start_step": 29001, "target": place, "lr_factor": factor}

    def part(first: int, last: int, rate: float, seed: int) -> list[tuple[int, Row]]:
        return rows(first, last, lambda _, chance: {"loss": 1.9 + 0.02 * float(chance.normal()), "lr": rate}, seed=seed)

    for applied, pages in ((factor, 0), (1.1 * factor, 1), (0.4 * factor, 1)):
        parts = part(28000, 29000, 1.77e-5, 0), part(29001, 29300, 1.77e-5 * applied, 1)
        made = lines_of(*parts, said={1: {"plan_applied": plan}})
        found = replayed(journal(tmp_path / f"run-{applied:g}", made))
        assert len(found.pages) == pages
        assert [one["opened_step"] for one in found.pages] == [29001] * pages


def a07(
    seed: int, sizes: list[float], mixed: bool = True, lasting: bool = False, length: int = 200
) -> list[list[tuple[int, Row]]]:
    """A segment for each bump: thirty steps of a higher loss with fewer images for each text, decaying."""
    attempts = []
    for segment, size in enumerate(sizes):
        first = 1 + length * segment

        def make(step: int, chance: np.random.Generator, first: int = first, size: float = size) -> Row:
            left = max(0.0, 1 - (step - first) / 30) if size else 0.0
            high = size if lasting and size > 0.5 else size * left
            row: Row = {"loss": 2.0 + high + 0.02 * float(chance.normal())}
            ratio = 1.0 - 0.4 * left + 0.005 * float(chance.normal())
            return {**row, "image_text_ratio": ratio} if mixed else row

        attempts.append(rows(first, first + length - 1, make, seed=100 * seed + segment))
    return attempts


@case("A07")
@pytest.mark.parametrize(("seed", "size"), [(0, 0.15), (1, 0.15), (2, 0.1), (0, 0.25), (2, 0.25)])
def test_a07_a_bump_at_each_resume_that_heals_pages_nobody_and_names_the_mix(
    tmp_path: Path, seed: int, size: float
) -> None:
    made = lines_of(*a07(seed, [0.0] + 12 * [size]), changes=[checkpoint(step) for step in range(200, 2600, 200)])
    found = replayed(journal(tmp_path / "run", made))
    assert found.told == []
    assert len(found.incidents) >= 8
    for one in found.incidents:
        assert (one["severity"], one["action"], one["cause"]["name"]) == ("info", "none", "data")
        assert "image_text_ratio" in says(one)


@case("A07")
@pytest.mark.parametrize("seed", SEEDS)
def test_a07_without_a_marked_resume_in_one_table_nobody_is_paged_either(tmp_path: Path, seed: int) -> None:
    made = [row for attempt in a07(seed, [0.0] + 12 * [0.15]) for row in attempt]
    found = replayed(table(tmp_path / "a07.csv", made))
    assert found.pages == []
    assert {one["action"] for one in found.incidents} <= {"none"}


@case("A07")
@pytest.mark.parametrize("seed", SEEDS)
def test_a07_a_bump_that_does_not_decay_is_a_page(tmp_path: Path, seed: int) -> None:
    made = lines_of(*a07(seed, [0.0, 0.15, 0.15, 0.15, 0.15, 0.6], lasting=True, length=400))
    pages = replayed(journal(tmp_path / "run", made)).pages
    assert [one["attempt"] for one in pages] == [5]
    assert 2001 <= pages[0]["onset_step"] <= 2005


@case("A07")
@pytest.mark.parametrize("seed", SEEDS)
def test_a07_a_bump_far_above_those_before_is_told(tmp_path: Path, seed: int) -> None:
    made = lines_of(*a07(seed, [0.0, 0.15, 0.15, 0.15, 0.15, 0.9], length=400))
    told = replayed(journal(tmp_path / "run", made)).told
    assert [one["attempt"] for one in told] == [5]


def a09(seed: int, resumed: int, epoch: int, level: float, off: float, noise: float) -> list[list[tuple[int, Row]]]:
    """Packed fine-tuning that is resumed in mid-epoch; until shortly before its end the loss is ``off`` lower, then an epoch drops."""

    def make(step: int, chance: np.random.Generator, again: bool) -> Row:
        high = level
        if step > 2 * epoch:
            high = level / 2
        elif again and step < 2 * epoch - epoch // 8:
            high = level - off
        return {"loss": high + noise * float(chance.normal()), "epoch": step / epoch, "lr": 1e-5}

    return [
        rows(epoch + 1, resumed + 92, lambda step, chance: make(step, chance, False), seed=seed),
        rows(resumed + 1, 2 * epoch + 336, lambda step, chance: make(step, chance, True), seed=seed + 10),
    ]


@case("A09")
@pytest.mark.parametrize(
    ("seed", "resumed", "epoch", "level", "off", "noise"),
    [(0, 2448, 1632, 0.20, 0.04, 0.01), (1, 1500, 1000, 1.4, 0.2, 0.05), (2, 1050, 700, 0.6, 0.12, 0.02)],
)
@pytest.mark.parametrize("as_table", [False, True])
def test_a09_a_loss_that_is_better_behind_a_resume_is_the_datas_order_and_its_return_no_spike(
    tmp_path: Path, seed: int, resumed: int, epoch: int, level: float, off: float, noise: float, as_table: bool
) -> None:
    parts = a09(seed, resumed, epoch, level, off, noise)
    if as_table:
        found = replayed(table(tmp_path / "a09.csv", [row for part in parts for row in part]))
    else:
        found = replayed(journal(tmp_path / "run", lines_of(*parts)))
    (fault,) = found.told  # neither the return nor the next epoch's drop is one
    assert resumed < fault["onset_step"] <= resumed + 20
    assert (fault["verdict"], fault["cause"]["name"]) == ("mismatch", "data")
    assert (fault["severity"], fault["action"], fault["plan"]) == ("warning", "none", None)


@case("A21")
@pytest.mark.parametrize("name", ["dataloader_offset", "sample_position"])
@pytest.mark.parametrize(("first", "second", "lost"), [(30, 10, 10), (400, 200, 200), (250, 25, 0)])
def test_a21_an_offset_that_the_second_resume_loses_is_a_warning_and_no_rollback(
    tmp_path: Path, name: str, first: int, second: int, lost: int
) -> None:
    """The state behind the second part says ``lost`` and not ``first + second``."""
    made: list[tuple[int, Row]] = []
    end = first + second
    for begin, last, at in ((1, first, 0), (first + 1, end, first), (end + 1, end + 60, lost)):
        for step in range(begin, last + 1):
            made.append((step, {"epoch": 0, name: at + step - begin + 1, "loss": 2.0 + 0.01 * math.sin(step * step)}))
    found = replayed(lines(tmp_path / "a21.jsonl", made))
    (fault,) = found.told
    assert (fault["onset_step"], fault["severity"]) == (end + 1, "warning")
    assert (fault["verdict"], fault["cause"]["name"]) == ("mismatch", "data")
    assert (fault["action"], fault["plan"]) == ("none", None)


@case("A21")
def test_a21_the_same_with_marked_resumes_is_of_the_second_one(tmp_path: Path) -> None:
    def part(first: int, last: int, at: int) -> list[tuple[int, Row]]:
        def make(step: int, chance: np.random.Generator) -> Row:
            return {"loss": 2.0 + 0.02 * float(chance.normal()), "sample_position": float(at + step - first + 1)}

        return rows(first, last, make, seed=first)

    made = lines_of(part(1, 30, 0), part(31, 40, 30), part(41, 90, 10))
    (fault,) = replayed(journal(tmp_path / "run", made)).told
    assert (fault["attempt"], fault["onset_step"], fault["severity"]) == (2, 41, "warning")
    assert (fault["verdict"], fault["cause"]["name"], fault["action"]) == ("mismatch", "data", "none")
    assert "was not restored" in says(fault)


def test_events_of_a_journal_are_read_back_as_they_were(tmp_path: Path) -> None:
    made = lines_of(a05(0), changes=[(17060, "resume", {})])
    events = [line for _, _, line in made if isinstance(line, Event)]
    assert [one.kind for one in events] == ["start", "resume"]
    assert "resume" in replayed(journal(tmp_path / "run", made)).kinds
