"""Cases of planned changes: an event or the configuration excuses what it announces, and nothing else does."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest

from tests.cases.build import Row, judge, rows
from tests.cases.registry import case
from trainwarden.rules.core.settings import PlannedChange, Settings


def settles(step: int, since: int, high: float, low: float, over: float = 50.0) -> float:
    """A value that begins high and comes down to a twentieth of its excess within ``over`` steps."""
    return low + (high - low) * 0.05 ** ((step - since) / over)


def extended(step: int, chance: np.random.Generator) -> Row:
    """Case B03: the context is extended behind step 1500."""
    loss, norm = 2.2, 1.0
    if step > 1500:
        loss, norm = settles(step, 1501, 5.5021, 2.2), settles(step, 1501, 249.48, 2.0)
    return {"loss": loss + 0.02 * float(chance.normal()), "grad_norm": norm * math.exp(0.1 * float(chance.normal()))}


STAGE = (1500, "stage", {"name": "long context", "seq_len": 65536})


@case("B03")
def test_b03_a_new_stage_that_settles_in_fifty_steps_is_said_and_pages_nobody() -> None:
    found = judge(rows(1, 2500, extended), changes=[STAGE])
    assert found.told == []
    (notice,) = [one for one in found.notices if one["kind"] == "planned_change"]
    assert notice["step"] == 1500
    assert "stage (name=long context, seq_len=65536)" in notice["says"]
    assert "The loss was 2.2" in notice["says"]


@case("B03")
def test_b03_the_same_without_a_word_is_told() -> None:
    assert judge(rows(1, 2500, extended)).told


@case("B03")
def test_b03_a_nan_in_the_first_steps_of_the_stage_pages_and_the_change_is_the_cause() -> None:
    def broken(step: int, chance: np.random.Generator) -> Row:
        return extended(step, chance) if step < 1520 else {"loss": math.nan, "grad_norm": math.nan}

    (page,) = judge(rows(1, 1600, broken), changes=[STAGE]).pages
    assert page["verdict"] == "nonfinite"
    assert page["onset_step"] == 1520
    assert page["cause"]["name"] == "planned_change"
    assert any(one["kind"] == "planned_change" and one["step"] == 1500 for one in page["evidence"])


@case("B03")
def test_b03_what_the_stage_hides_is_seen_again_behind_it() -> None:
    def spiked(step: int, chance: np.random.Generator) -> Row:
        row = extended(step, chance)
        if 2200 <= step < 2210:
            row["loss"] += 0.5
        return row

    (incident,) = judge(rows(1, 2600, spiked), changes=[STAGE]).told
    assert 2199 <= incident["onset_step"] <= 2202
    assert incident["verdict"] == "transient_spike"
    assert incident["state"] == "recovered"
    assert incident["cause"]["name"] != "planned_change"


def mixture(step: int, chance: np.random.Generator) -> Row:
    """Case B08: another mixture from step 108000 on gives the loss another level."""
    return {"loss": (2.05 if step < 108_000 else 2.19) + 0.02 * float(chance.normal()), "lr": 3e-4}


SCHEDULE = PlannedChange(step=108_000, kind="mixture", run="cas*", note="phase 2")


@case("B08")
def test_b08_a_planned_mixture_is_learned_anew_and_pages_nobody() -> None:
    found = judge(rows(106_000, 110_000, mixture), settings=Settings(planned_changes=(SCHEDULE,)))
    assert found.incidents == []
    (notice,) = [one for one in found.notices if one["kind"] == "planned_change"]
    assert notice["step"] == 107_999
    assert "configuration" in notice["says"]
    assert "The loss was 2.0" in notice["says"]
    assert "and is 2.1" in notice["says"]


@case("B08")
@pytest.mark.parametrize("planned", [(), (PlannedChange(step=108_000, kind="mixture", run="other"),)])
def test_b08_the_same_shift_without_an_entry_is_a_level_shift_and_a_page(planned: tuple[PlannedChange, ...]) -> None:
    found = judge(rows(106_000, 110_000, mixture), settings=Settings(planned_changes=planned))
    (page,) = found.pages
    assert found.told == [page]
    assert page["onset_step"] == 108_000
    assert page["verdict"] == "level_shift"
    assert "planned_change" not in found.kinds


@case("B08")
def test_b08_a_second_shift_behind_the_planned_one_is_a_page() -> None:
    def twice(step: int, chance: np.random.Generator) -> Row:
        row = mixture(step, chance)
        row["loss"] += 0.14 * (step >= 109_000)
        return row

    page = judge(rows(106_000, 111_000, twice), settings=Settings(planned_changes=(SCHEDULE,))).pages[0]
    assert page["verdict"] == "level_shift"
    assert 108_995 <= page["onset_step"] <= 109_010


def small_batches(step: int, chance: np.random.Generator) -> Row:
    """The batch is a sixteenth from step 2001 on: the gradient and its noise are four times as large."""
    factor = 4.0 if step > 2000 else 1.0
    norm = 0.5 * factor * math.exp(0.1 * float(chance.normal()))
    return {"loss": 2.2 + 0.01 * math.sqrt(factor) * float(chance.normal()), "grad_norm": norm, "lr": 3e-4 / factor}


def test_an_announced_batch_size_excuses_the_gradient_and_not_the_loss() -> None:
    event = (2000, "batch_size", {"samples": 64})
    assert judge(rows(1, 3000, small_batches), changes=[event]).told == []

    def spiked(step: int, chance: np.random.Generator) -> Row:
        row = small_batches(step, chance)
        row["loss"] += 0.4 * (2030 <= step < 2040)
        return row

    (incident,) = judge(rows(1, 3000, spiked), changes=[event]).told
    assert 2029 <= incident["onset_step"] <= 2031


def test_a_batch_size_that_nobody_announced_is_told() -> None:
    (incident,) = judge(rows(1, 3000, small_batches)).told
    assert incident["alerts"] == ["TrainingGradNormSurge"]


def restarted(step: int, chance: np.random.Generator) -> Row:
    """The rate of a schedule with restarts goes up threefold behind step 3000."""
    return {"loss": 2.5 + 0.02 * float(chance.normal()), "lr": 3e-4 if step > 3000 else 1e-4}


@pytest.mark.parametrize(("events", "told"), [([(3000, "lr_phase", {"name": "restart"})], []), ([], ["mismatch"])])
def test_a_jump_of_the_rate_is_told_unless_a_phase_announces_it(events: list[Any], told: list[str]) -> None:
    found = judge(rows(1, 4000, restarted), changes=events)
    assert [one["verdict"] for one in found.told] == told


@case("A03")
def test_a03_the_end_of_the_warm_up_hides_no_divergence() -> None:
    climb = {3010: 6.37, 3020: 6.6, 3030: 7.3, 3040: 9.1}

    def make(step: int, chance: np.random.Generator) -> Row:
        loss = climb.get(step, 10.2 if step > 3040 else 6.35)
        return {"loss": loss + 0.04 * float(chance.normal()), "lr": 6e-5 * min(1.0, step / 3000)}

    found = judge(rows(10, 4500, make, stride=10), stride=10, changes=[(3000, "lr_phase", {"name": "stable"})])
    page = found.pages[0]
    assert page["verdict"] in ("divergence", "level_shift")
    assert 3000 <= page["onset_step"] <= 3030


def test_news_of_a_mixture_that_come_late_take_back_what_is_open() -> None:
    event = (107_999, "mixture", {"name": "phase 2"})
    (told,) = judge(rows(106_000, 110_000, mixture), changes=[event], told_after=108_060).told
    assert told["opened_step"] == 108_000
    assert told["closed_step"] == 108_061
    assert told["state"] == "dismissed"
    assert told["cause"]["name"] == "planned_change"


def test_news_that_come_behind_a_page_keep_from_a_second_one() -> None:
    event = (107_999, "mixture", {"name": "phase 2"})
    (page,) = judge(rows(106_000, 110_000, mixture), changes=[event], told_after=108_110).pages
    assert page["state"] == "escalated"
    assert page["closed_step"] == 108_103


@case("A09")
def test_a09_a_loss_that_falls_at_the_border_of_an_epoch_is_told_to_nobody() -> None:
    def make(step: int, chance: np.random.Generator) -> Row:
        return {"loss": (0.2 if step <= 1632 else 0.1) + 0.01 * float(chance.normal()), "epoch": float(step > 1632)}

    assert judge(rows(1, 3264, make), changes=[(1632, "epoch", {"epoch": 1})]).told == []
