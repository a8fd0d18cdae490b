"""Cases of category a that a resume brings: what was not restored is found by comparison with the attempt before."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest

from tests.cases.build import Row, Verdicts, judge, play, rows, steady
from tests.cases.registry import case
from trainwarden.record import Event, Step
from trainwarden.rules.core.inputs import Start


def counted(step: int, chance: np.random.Generator, counter: float, update: float = 1.0) -> Row:
    return {
        "loss": 2.667 + 0.02 * float(chance.normal()),
        "grad_norm": {"all": abs(1.0 + 0.1 * float(chance.normal()))},
        "lr": {"all": 3e-5},
        "optimizer_step": counter,
        "update_ratio": {"all": 2e-4 * update * math.exp(0.05 * float(chance.normal()))},
    }


def biased(steps: int, beta1: float = 0.9, beta2: float = 0.95) -> float:
    """How much larger than usual Adam's update is when its counter begins anew over moments that are kept."""
    return math.sqrt(1 - beta2**steps) / (1 - beta1**steps) if steps > 0 else 1.0


@case("A05")
def test_a05_a_counter_that_was_not_restored_is_the_optimizers_state_and_no_rollback() -> None:
    bumps = {0: 0.0, 1: 1.707, 2: 1.3, 3: 1.0, 4: 0.8, 5: 0.6, 6: 0.45, 7: 0.3, 8: 0.2}

    def after(step: int, chance: np.random.Generator) -> Row:
        since = step - 17060
        row = counted(step, chance, float(since), biased(since))
        row["loss"] += bumps.get(since, 0.0)
        return row

    found = judge(
        rows(16500, 17060, lambda step, chance: counted(step, chance, float(step))), rows(17061, 17500, after, seed=1)
    )
    (incident,) = found.told
    assert incident["onset_step"] <= 17063
    assert incident["opened_step"] <= 17064
    assert incident["cause"]["name"] == "optimizer_state"
    assert incident["action"] in ("none", "escalate")
    assert any("step counter is 1 at step 17061" in one["says"] for one in incident["evidence"])


@case("A05")
def test_a05_a_loss_that_stays_high_after_it_goes_to_a_person_and_not_back_to_the_same_checkpoint() -> None:
    def after(step: int, chance: np.random.Generator) -> Row:
        row = counted(step, chance, float(step - 17060), biased(step - 17060))
        row["loss"] += 1.7 if step > 17061 else 0.0
        return row

    saved = Event(kind="checkpoint", time=0.0, step=17000, fields={"path": "ckpt/17000", "step": 17000, "complete": True, "finite": True})  # fmt: skip
    found = judge(
        rows(16500, 17060, lambda step, chance: counted(step, chance, float(step))),
        rows(17061, 17500, after, seed=1),
        events={0: [saved]},
    )
    (page,) = found.pages
    assert page["action"] == "escalate"
    assert page["state"] == "escalated"
    assert page["cause"]["name"] == "optimizer_state"


@case("A05")
def test_a05_a_norm_that_repeats_while_the_scale_falls_is_stale() -> None:
    scales = [1048576.0 / 2**place for place in range(6)]

    def after(step: int, chance: np.random.Generator) -> Row:
        since = step - 17061
        row: Row = {"loss": 2.667 + 0.02 * float(chance.normal()), "grad_norm": abs(4e5 + 4e4 * float(chance.normal()))}
        if 0 <= since < 6:
            row |= {"grad_norm": 464441.887}
        return row | {"loss_scale": scales[min(max(since, 0), 5)]}

    found = judge(rows(16900, 17200, after))
    (stale,) = [one for one in found.notices if one["kind"] == "repeated_signal"]
    assert stale["signal"] == "grad_norm"
    assert 17062 <= stale["step"] <= 17064


def lr_ramp(step: int) -> float:
    return 3e-5 * min(1.0, (step - 29000) / 1200 * 1.5)


@case("A06")
def test_a06_a_rate_that_begins_again_from_zero_pages_within_five_steps_and_before_the_loss_moves() -> None:
    before = rows(28000, 29000, lambda step, chance: {"loss": 1.9 + 0.02 * float(chance.normal()), "lr": 2.2e-5})

    def after(step: int, chance: np.random.Generator) -> Row:
        rate = 6e-5 * (step - 29000) / 2000
        spike = 1.5 if rate > 3.5e-5 and step < 30300 else 0.0
        return {"loss": 1.9 + spike + 0.02 * float(chance.normal()), "lr": rate}

    found = judge(before, rows(29001, 30600, after, seed=1))
    page = found.pages[0]
    assert page["opened_step"] <= 29005
    assert page["severity"] == "critical"
    assert page["verdict"] == "mismatch"
    assert page["cause"]["name"] == "learning_rate"
    assert page["action"] == "escalate"
    assert [one["action"] for one in found.incidents if one["action"] == "rollback"] == []


@case("A06")
def test_a06_without_a_marked_resume_it_is_found_as_soon() -> None:
    def make(step: int, chance: np.random.Generator) -> Row:
        rate = 2.2e-5 if step <= 29000 else 6e-5 * (step - 29001) / 2000
        return {"loss": 1.9 + 0.02 * float(chance.normal()), "lr": rate}

    page = judge(rows(28000, 29300, make)).pages[0]
    assert page["opened_step"] <= 29006
    assert page["verdict"] == "mismatch"


@case("A07")
def test_a07_a_bump_at_each_resume_that_heals_pages_nobody_and_is_written_down() -> None:
    attempts = []
    for segment in range(12):
        first = 1 + 200 * segment

        def make(step: int, chance: np.random.Generator, first: int = first, segment: int = segment) -> Row:
            left = max(0.0, 1 - (step - first) / 30) if segment else 0.0
            mix = 1.0 - 0.4 * left
            return {"loss": 2.0 + 0.15 * left + 0.02 * float(chance.normal()), "image_text_ratio": mix}

        attempts.append(rows(first, first + 199, make, seed=segment))
    found = judge(*attempts)
    assert found.told == []
    assert len(found.incidents) >= 8
    assert {one["severity"] for one in found.incidents} == {"info"}
    said = [[each["says"] for each in one["evidence"] if "image_text_ratio" in each["says"]] for one in found.incidents]
    assert all(said)
    assert {one["cause"]["name"] for one in found.incidents} == {"data"}


EPOCH = 1632


def packed(step: int, chance: np.random.Generator, resumed: bool) -> Row:
    level = 0.20
    if step > 2 * EPOCH:
        level = 0.10
    elif resumed and step < 2 * EPOCH - 200:
        level = 0.16
    return {"loss": level + 0.01 * float(chance.normal()), "epoch": step / EPOCH, "lr": 1e-5}


@case("A09")
def test_a09_a_loss_that_is_better_behind_a_resume_is_data_and_its_return_is_no_spike() -> None:
    found = judge(
        rows(1633, 2540, lambda step, chance: packed(step, chance, False)),
        rows(2449, 3600, lambda step, chance: packed(step, chance, True), seed=1),
    )
    (fault,) = [one for one in found.told if one["onset_step"] < 2600]
    assert 2449 <= fault["onset_step"] <= 2468
    assert fault["verdict"] == "mismatch"
    assert fault["cause"]["name"] == "data"
    assert fault["action"] == "none"
    later = [one for one in found.told if one["onset_step"] >= 2600]
    assert [one for one in later if one["severity"] == "critical" or one["onset_step"] > 3200] == []


@case("A09")
def test_a09_an_epoch_that_begins_right_behind_a_resume_may_lie_lower() -> None:
    found = judge(
        rows(1633, 3264, lambda step, chance: packed(step, chance, False)),
        rows(3265, 3800, lambda step, chance: packed(step, chance, False), seed=1),
    )
    assert found.told == []


def offsets(first: int, last: int, at: int, epochs: bool) -> list[tuple[int, Row]]:
    def make(step: int, chance: np.random.Generator) -> Row:
        row: Row = {"loss": 2.0 + 0.02 * float(chance.normal()), "sample_position": float(at + step - first + 1)}
        return row | ({"epoch": 0.0} if epochs else {})

    return rows(first, last, make, seed=first)


@case("A21")
@pytest.mark.parametrize("epochs", [True, False])
def test_a21_an_offset_that_is_lost_at_the_second_resume_is_a_matter_of_the_data(epochs: bool) -> None:
    found = judge(offsets(1, 30, 0, epochs), offsets(31, 40, 30, epochs), offsets(41, 90, 10, epochs))
    (fault,) = found.told
    assert fault["attempt"] == 2
    assert fault["onset_step"] == 41
    assert fault["severity"] == "warning"
    assert fault["verdict"] == "mismatch"
    assert fault["cause"]["name"] == "data"
    assert fault["action"] == "none"


@case("A21")
def test_a21_an_offset_that_goes_back_within_an_epoch_is_one_too_where_no_resume_was_told() -> None:
    found = judge([*offsets(1, 40, 0, True), *offsets(41, 90, 10, True)])
    (fault,) = found.told
    assert (fault["opened_step"], fault["verdict"]) == (41, "mismatch")


@case("A21")
def test_a21_samples_that_a_resume_passes_over_are_never_seen() -> None:
    found = judge(offsets(1, 30, 0, True), offsets(31, 90, 50, True))
    assert [(one["onset_step"], one["cause"]["name"]) for one in found.told] == [(31, "data")]


# -- controls ------------------------------------------------------------------------------------------------------


def whole(step: int, chance: np.random.Generator) -> Row:
    """A step of a healthy run in every signal that is compared."""
    return {
        "loss": 1.8 + 3.0 * step**-0.35 + 0.03 * float(chance.normal()),
        "grad_norm": {"all": math.exp(0.15 * float(chance.normal()))},
        "lr": {"all": 1e-3 * min(1.0, step / 400) * (0.55 + 0.45 * math.cos(math.pi * step / 3000))},
        "optimizer_step": float(step - 3) if step % 10 == 0 else None,
        "update_ratio": {"all": 1e-3 * math.exp(0.1 * float(chance.normal()))} if step % 10 == 0 else None,
        "epoch": float(step // 700),
        "sample_position": float(16 * (step % 700 + 1)),
    }


def healthy(first: int, last: int, seed: int, change: Any = None) -> list[tuple[int, Row]]:
    made = rows(first, last, whole, seed=seed)
    for step, row in made:
        if change is not None:
            change(step, row)
        for name in [name for name, value in row.items() if value is None]:
            del row[name]
    return made


@pytest.mark.parametrize("at", [60, 200, 399, 690, 701, 1500, 2900])
@pytest.mark.parametrize("again", [0, 12])
def test_a_healthy_resume_is_nothing(at: int, again: int) -> None:
    found = judge(healthy(1, at + again, 0), healthy(at + 1, at + 300, 1))
    assert found.incidents == []


def halved(step: int, row: Row) -> None:
    row["lr"] = {"all": row["lr"]["all"] * 0.5 * min(1.0, (step - 1000) / 50)}
    if row["optimizer_step"] is not None:
        row["optimizer_step"] = float(step - 1000)


def test_what_a_plan_changed_is_no_fault_and_the_same_without_a_plan_is() -> None:
    applied = {
        "plan_id": "plan_x",
        "start_step": 1001,
        "target": {"attempt": 0, "step": 1000, "path": "ckpt"},
        "reset_optimizer": True,
        "lr_factor": 0.5,
        "rewarmup_steps": 50,
    }
    before, after = healthy(1, 1000, 0), healthy(1001, 1400, 1, halved)
    assert judge(before, after, said={1: {"plan_applied": applied}}).told == []
    assert [one["verdict"] for one in judge(before, after).pages] == ["mismatch"]


def test_a_factor_of_a_plan_is_compared_as_a_factor() -> None:
    applied = {
        "plan_id": "p",
        "start_step": 1001,
        "target": {"attempt": 0, "step": 1000, "path": "c"},
        "lr_factor": 0.5,
    }

    def at(factor: float) -> Verdicts:
        def change(step: int, row: Row) -> None:
            row["lr"] = {"all": row["lr"]["all"] * factor}

        return judge(healthy(1, 1000, 0), healthy(1001, 1300, 1, change), said={1: {"plan_applied": applied}})

    assert at(0.5).told == []
    assert [one["opened_step"] for one in at(1.0).pages] == [1001]


def test_a_new_schedule_that_an_event_announces_is_no_fault() -> None:
    def change(step: int, row: Row) -> None:
        row["lr"] = {"all": 2e-3 * min(1.0, (step - 1000) / 100)}

    before, after = healthy(1, 1050, 0), healthy(1001, 1400, 1, change)
    told = Event(kind="lr_phase", time=0.0, step=1000, fields={"schedule": "second"})
    assert judge(before, after, events={1: [told]}).told == []
    assert judge(before, after).pages[0]["verdict"] == "mismatch"


def test_a_resume_that_an_event_tells_of_within_a_start_is_compared_with_the_records_before_it() -> None:
    start = Start("uid", "case", 0, "start-0")
    lines: list[tuple[Start, int, Step | Event]] = []
    for step, row in rows(16500, 17200, lambda step, chance: counted(step, chance, float(step if step <= 17060 else step - 17060))):  # fmt: skip
        lines.append((start, 0, Step(seq=0, step=step, time=float(step), signals=row)))
        if step == 17060:
            lines.append((start, 0, Event(kind="resume", time=float(step), step=step)))
    found = play(lines)
    assert "resume" in found.kinds
    assert found.told[0]["cause"]["name"] == "optimizer_state"


@pytest.mark.parametrize("loss", [2.0, 2.0 + 1e-9])
def test_the_loss_of_a_steady_run_may_begin_where_it_was(loss: float) -> None:
    assert judge(rows(1, 400, steady(2.0, 0.02)), rows(401, 800, steady(loss, 0.02), seed=1)).incidents == []
