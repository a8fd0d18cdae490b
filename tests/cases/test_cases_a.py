"""Cases of category a, spikes with a cause: the input is built as the case says, the verdict is the case's.

The logs are files in their writers' words, replayed by the public command; what the records say of checkpoints and samples is played
as an exporter would tell it.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.cases.build import Row, Verdicts, judge, lines_of, rows, steady
from tests.cases.build_files import journal, lines, replayed, table
from tests.cases.registry import case
from tests.rules.core.runs import Played, default_pack
from trainwarden.record import Event, Step
from trainwarden.rules.core.effects import Deliver
from trainwarden.rules.core.feed import new_state
from trainwarden.rules.core.inputs import Happened, Steps
from trainwarden.rules.core.settings import Settings

SEEDS = (0, 1, 2)

LOG_A01 = {
    31214: (2.198845, 0.242),
    31215: (2.220424, 0.947),
    31216: (2.595213, 2.39),
    31217: (2.241558, 15.886),
    31218: (2.345279, 145.119),
    31219: (5.098124, 960.351),
    31220: (3.492029, 353.201),
    31221: (3.213059, 379.33),
    31222: (2.804948, 650.246),
    31250: (2.215699, 0.267),
    31251: (2.235667, 0.205),
}


def a01(seed: int, last: int = 31600) -> list[tuple[int, Row]]:
    def make(step: int, chance: np.random.Generator) -> Row:
        loss, norm = 2.2 + 0.02 * float(chance.normal()), abs(0.2 + 0.05 * float(chance.normal()))
        if step in LOG_A01:
            loss, norm = LOG_A01[step]
        elif 31222 < step < 31250:
            share = (step - 31222) / 28
            loss = 2.2 + 0.6 * (0.0157 / 0.6) ** share
            norm = 650.246 * (0.267 / 650.246) ** share
        return {"loss": loss, "grad_norm": norm, "lr": 5.279e-5}

    return rows(30714, last, make, seed=seed)


def checkpoint(step: int, **fields: Any) -> tuple[int, str, dict[str, Any]]:
    return step, "checkpoint", {"path": f"c{step}", "complete": True, **fields}


@case("A01")
@pytest.mark.parametrize("seed", SEEDS)
def test_a01_a_spike_of_which_the_gradient_tells_first_heals_without_an_action(tmp_path: Path, seed: int) -> None:
    found = replayed(table(tmp_path / "a01.csv", a01(seed)))
    (incident,) = found.told
    assert incident["alerts"][0] == "TrainingGradNormSurge"
    assert 31215 <= incident["onset_step"] <= incident["opened_step"] <= 31217  # two steps or more before the loss
    assert 31219 <= incident["confirmed_step"] <= 31222
    assert 31250 <= incident["closed_step"] <= 31350
    assert (incident["state"], incident["severity"], incident["verdict"]) == ("recovered", "warning", "transient_spike")
    assert (incident["action"], incident["plan"], incident["held_by"]) == ("none", None, None)
    assert incident["cause"]["name"] in ("undetermined", "optimizer_state", "learning_rate")
    assert incident["cause"]["scores"].get("data", 0.0) < 0.1
    assert any("grad_norm was abnormal 4 steps before the loss" in one["says"] for one in incident["evidence"])


@case("A01")
def test_a01_the_checkpoint_before_it_is_pinned_before_the_loss_moves() -> None:
    made = lines_of(a01(0), changes=[checkpoint(step) for step in (30900, 31050, 31200, 31259)])
    played = Played(new_state(Settings(mode="act", receiver=True), default_pack()))
    pins: list[tuple[int, Deliver]] = []
    for start, rank, line in made:
        told = Steps(start, rank, (line,)) if isinstance(line, Step) else Happened(start, rank, line)
        sent = [one for one in played.take(told) if isinstance(one, Deliver) and one.kind == "webhook"]
        pins += [(line.step or 0, one) for one in sent]
    ((step, pin),) = pins
    assert pin.body["type"] == "training.checkpoint.pin.requested"  # and nothing else is asked for
    assert step <= 31217
    assert pin.body["data"]["plan"]["target"]["step"] == 31200


def a04(seed: int, last: int = 14500) -> list[tuple[int, Row]]:
    bad = {11446: (3.062589, 12952.562), 11447: (3.114286, 262623.331), 11448: (7.71234, 254699.302)}

    def make(step: int, chance: np.random.Generator) -> Row:
        loss, norm = 3.08 + 0.03 * float(chance.normal()), abs(13000 + 1500 * float(chance.normal()))
        if step > 11448:
            loss += 4.5 * math.exp(-(step - 11448) / 400)
        loss, norm = bad.get(step, (loss, norm))
        seen = 1255856 + 432 * (step - 11446)
        row: Row = {"loss": loss, "grad_norm": norm, "loss_scale": 65536.0, "lr": 3e-5}
        return {**row, "consumed_samples": seen, "global_batch": 432}

    return rows(10900, last, make, seed=seed)


@case("A04")
@pytest.mark.parametrize("seed", SEEDS)
def test_a04_the_samples_of_the_gradients_step_are_suspect_and_the_data_a_candidate(tmp_path: Path, seed: int) -> None:
    found = replayed(table(tmp_path / "a04.csv", a04(seed)))
    (incident,) = found.told
    assert incident["onset_step"] == 11447  # the gradient's step, not that of the loss
    assert incident["verdict"] == "slow_recovery"
    (suspects,) = incident["suspect_samples"]
    # Whether a count is taken before or behind the step's own batch no log says; both readings are within one record.
    assert suspects[0] <= 1255856 < 1256720 <= suspects[1]
    assert suspects[1] - suspects[0] <= 3 * 432
    cause = incident["cause"]
    assert max(cause["scores"], key=cause["scores"].get) == "data"
    assert cause["name"] in ("data", "undetermined")
    assert 0.2 <= cause["confidence"] <= 0.7
    assert "trainwarden data show --step 11447" in incident["cheapest_test"]
    assert incident["plan"] is None or incident["held_by"] == "approval"


@case("A04")
def test_a04_where_records_tell_the_samples_they_are_those_of_the_gradients_step() -> None:
    plain = [(step, {name: row[name] for name in ("loss", "grad_norm", "lr")}) for step, row in a04(0, 12000)]
    incident = judge(plain, samples=432).told[0]
    assert incident["onset_step"] == 11447
    assert incident["suspect_samples"] == [[11445 * 432, 11447 * 432]]


def a11(
    seed: int, shift: float = 0.015, at: int = 3000, level: float = 1.96, sd: float = 0.008
) -> list[tuple[int, Row]]:
    def make(step: int, chance: np.random.Generator) -> Row:
        base = level - 1e-6 * step
        if at <= step < at + 5:
            base = level + 0.06 * level / 1.96
        elif step >= at + 5:
            base += shift
        return {"loss": base + sd * float(chance.normal())}

    return rows(1, at + 1500, make, seed=seed)


@case("A11")
@pytest.mark.parametrize(
    ("seed", "at", "level", "share"),
    [(0, 3000, 1.96, 0.0077), (1, 3000, 1.96, 0.0077), (2, 1200, 2.8, 0.009), (1, 2000, 1.4, 0.0075)],
)
def test_a11_a_spike_that_settles_a_little_high_is_a_level_shift_and_a_page(
    tmp_path: Path, seed: int, at: int, level: float, share: float
) -> None:
    found = replayed(table(tmp_path / "a11.csv", a11(seed, share * level, at, level, 0.0041 * level)))
    (page,) = found.pages
    assert page["verdict"] == "level_shift"
    assert abs(page["onset_step"] - at) <= 40
    assert page["state"] == "escalated"
    assert page["opened_step"] <= at + 450


@case("A11")
@pytest.mark.parametrize("seed", [0, 1])
def test_a11_the_same_spike_that_comes_back_to_its_level_is_no_page(tmp_path: Path, seed: int) -> None:
    found = replayed(table(tmp_path / "a11.csv", a11(seed, shift=0.0)))
    assert found.pages == []
    assert all(one["state"] == "recovered" for one in found.incidents)


@case("A11")
@pytest.mark.parametrize("seed", SEEDS)
def test_a11_a_rollback_behind_which_the_loss_settles_as_high_again_did_not_help(seed: int) -> None:
    plan = {"plan_id": "plan_x", "start_step": 2901, "target": {"attempt": 0, "step": 2900, "path": "c2900"}}
    made = a11(seed)
    found = judge(
        [(step, row) for step, row in made if step <= 3450],
        [(step, row) for step, row in made if 2900 < step <= 3900],
        said={1: {"plan_applied": plan}},
        changes=[checkpoint(step) for step in (2500, 2900)],
    )
    first = found.pages[0]
    assert first["verdict"] == "level_shift"
    assert first["state"] == "not_recovered"
    assert all(one["state"] != "recovered" for one in found.pages)


@case("A13")
@pytest.mark.parametrize("seed", SEEDS)
def test_a13_a_masked_nan_is_one_numeric_page_and_no_convergence(tmp_path: Path, seed: int) -> None:
    healthy = rows(1, 300, steady(0.2, 0.03, grad_norm=(1.0, 0.1)), seed=seed)
    broken: list[tuple[int, Row]] = [(301, {"loss": 0.2051, "grad_norm": math.nan})]
    broken += [(step, {"loss": 0.0, "grad_norm": math.nan}) for step in range(302, 502)]
    rates = [(step, {**row, "lr": 9.774074e-06}) for step, row in [*healthy, *broken]]
    found = replayed(table(tmp_path / "a13.csv", rates))
    (incident,) = found.incidents
    assert (incident["severity"], incident["verdict"]) == ("critical", "nonfinite")
    assert (incident["onset_step"], incident["opened_step"]) == (301, 301)
    assert incident["cause"]["name"] == "numeric"
    assert incident["state"] != "recovered"
    assert "masked_nonfinite" in found.kinds


@case("A13")
@pytest.mark.parametrize("told", [{}, {"finite": True}])
def test_a13_it_goes_back_to_a_checkpoint_strictly_before_the_first_bad_row(told: dict[str, bool]) -> None:
    healthy = rows(1, 300, steady(0.2, 0.03, grad_norm=(1.0, 0.1)))
    broken: list[tuple[int, Row]] = [(301, {"loss": 0.2051, "grad_norm": math.nan})]
    broken += [(step, {"loss": 0.0, "grad_norm": math.nan}) for step in range(302, 502)]
    saved = [checkpoint(step, **told) for step in (200, 295, 301, 302, 350, 450)]
    (incident,) = judge([*healthy, *broken], changes=saved, said={0: {"betas": [0.9, 0.95]}}).incidents
    assert incident["action"] == "rollback"
    plan = incident["plan"]
    assert plan["target"]["step"] < 301
    assert all(one["step"] < 301 for one in plan["fallback_targets"])
    assert plan["reset_optimizer"] is True
    assert plan["lr_factor"] == 1.0


A15 = {200: 2.7522, 210: 2.6150, 220: 2.6687, 230: 2.7682, 240: 2.5128, 250: 2.4566}


@case("A15")
@pytest.mark.parametrize(("seed", "before"), [(0, 0), (1, 100)])
@pytest.mark.parametrize("total", [False, True])
def test_a15_skips_of_a_scaler_within_an_averaged_window_page_nobody(
    tmp_path: Path, seed: int, before: int, total: bool
) -> None:
    """``total``: the log counts skipped steps from its beginning, and does not say so in the name."""

    def make(step: int, chance: np.random.Generator) -> Row:
        nan = step in (240 + 10 * before, 250 + 10 * before)
        skips = min(max((step - 230) // 10 - before, 0), 2) if total else float(nan)
        norm = math.nan if nan else abs(2.7 + 0.3 * float(chance.normal()))
        loss = A15.get(step - 10 * before, 2.6 + 0.12 * float(chance.normal()))
        return {"loss": loss, "grad_norm": norm, "lr": 2e-4, "loss_scale": 1024.0 / (1 + nan), "skipped": skips}

    found = replayed(table(tmp_path / "a15.csv", rows(200, 3500 + 10 * before, make, stride=10, seed=seed)))
    assert found.told == []
    (notice,) = [one for one in found.notices if one["kind"] == "skipped_steps"]
    assert notice["step"] == 240 + 10 * before
    if not total:
        assert "skipped 2 steps" in notice["says"]


def a17(seed: int, poisoned: bool, at: int = 411) -> list[tuple[int, Row]]:
    """A batch without a single target; where the loss's class lets it, what it made of the weights stays."""

    def make(step: int, chance: np.random.Generator) -> Row:
        broken = step == at or (poisoned and step > at)
        loss = math.nan if broken else 1.83 + 0.03 * float(chance.normal())
        norm = math.nan if broken else 1 + 0.1 * float(chance.normal())
        tokens = 0.0 if step == at else float(chance.integers(1800, 2048))
        return {"loss": loss, "valid_tokens": tokens, "grad_norm": norm, "lr": 1e-4}

    return rows(1, at + 190, make, seed=seed)


@case("A17")
@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("poisoned", [False, True])
def test_a17_a_batch_without_targets_is_a_matter_of_the_data(tmp_path: Path, seed: int, poisoned: bool) -> None:
    found = replayed(table(tmp_path / "a17.csv", a17(seed, poisoned)))
    (incident,) = found.told
    assert (incident["onset_step"], incident["verdict"]) == (411, "nonfinite")
    assert incident["cause"]["name"] == "data"
    assert incident["cause"]["scores"].get("numeric", 0.0) < 0.3
    assert any("no supervised token" in one["says"] for one in incident["evidence"])
    if not poisoned:
        assert incident["action"] == "none"
        assert incident["state"] == "recovered"


@case("A17")
def test_a17_only_weights_that_are_spoilt_are_rolled_back_and_that_batch_alone_is_skipped() -> None:
    def played(poisoned: bool) -> Verdicts:
        named = [(step, {"batch_supervised_tokens": row.pop("valid_tokens"), **row}) for step, row in a17(0, poisoned)]
        return judge(
            named,
            samples=8,
            said={0: {"can_skip": ["substitute"]}},
            changes=[checkpoint(step, finite=True) for step in (200, 400)],
        )

    (incident,) = played(True).told
    assert incident["action"] == "rollback"
    plan = incident["plan"]
    assert plan["target"]["step"] == 400
    assert plan["skip_samples"] == [[410 * 8, 411 * 8]]
    assert (plan["lr_factor"], plan["reset_optimizer"]) == (1.0, False)
    assert played(False).told[0]["action"] == "none"


@case("A18")
@pytest.mark.parametrize("seed", SEEDS)
def test_a18_a_nan_behind_a_running_mean_pages_by_the_counter(tmp_path: Path, seed: int) -> None:
    chance, total, made = np.random.default_rng(seed), 0, []
    for step in range(1, 481):
        broken = step >= 400
        total += broken
        loss = 1.913742 if broken else 1.91 + 0.02 * float(chance.normal())
        made.append((step, {"loss": loss, "nonfinite_total": total}))
    found = replayed(lines(tmp_path / "a18.jsonl", made))
    (page,) = found.pages
    assert (page["verdict"], page["onset_step"], page["cause"]["name"]) == ("nonfinite", 400, "numeric")
    assert "repeated_signal" in found.kinds or "masked_nonfinite" in found.kinds


@case("A18")
def test_a18_where_the_counter_is_by_quantity_it_is_the_same() -> None:
    def make(step: int, chance: np.random.Generator) -> Row:
        broken = step >= 400
        loss = 1.91 if broken else 1.91 + 0.02 * float(chance.normal())
        return {"loss": loss, "nonfinite": {"loss": float(broken), "grad": float(broken)}}

    found = judge(rows(1, 480, make))
    (page,) = found.pages
    assert (page["verdict"], page["onset_step"]) == ("nonfinite", 400)
    assert "repeated_signal" in found.kinds


@case("A30")
@pytest.mark.parametrize(("seed", "factor"), [(0, 8), (1, 2), (2, 4), (0, 1 / 32)])
def test_a30_a_loss_that_is_logged_times_eight_after_a_restart_is_no_spike(
    tmp_path: Path, seed: int, factor: float
) -> None:
    before = rows(1, 1000, steady(2.1, 0.02), seed=seed)
    after = rows(1001, 1400, steady(2.1 * factor, 0.02 * factor), seed=seed + 10)
    said = {0: {"gradient_accumulation_steps": 1}, 1: {"gradient_accumulation_steps": 8}}
    found = replayed(journal(tmp_path / "run", lines_of(before, after, said=said)))
    assert found.told == []
    (notice,) = [one for one in found.notices if one["kind"] == "logging_scale_change"]
    assert notice["signal"] == "loss"
    assert notice["step"] == 1001


@case("A30")
@pytest.mark.parametrize("seed", SEEDS)
def test_a30_in_a_table_without_a_marked_restart_it_is_none_either(tmp_path: Path, seed: int) -> None:
    made = rows(1, 1000, steady(2.1, 0.02), seed=seed) + rows(1001, 1400, steady(16.8, 0.16), seed=seed + 10)
    found = replayed(table(tmp_path / "a30.csv", made))
    assert found.told == []
    assert "logging_scale_change" in found.kinds


A43 = (3.9883, 3.9408, 3.9994, 4.0977, 4.1535, 3.9453, 3.8993, 3.8853, 4.249)


def a43() -> list[tuple[int, Row]]:
    times = [1099.34, 1097.3, 1097.68, 1096.94, 1097.23, 1097.65, 1099.18, 1096.65, 35392.33, *[1019.95] * 6]
    losses = [*A43, *[math.nan] * 6]
    return [
        (2920 + 10 * place, {"loss": loss, "time_ms": time})
        for place, (loss, time) in enumerate(zip(losses, times, strict=True))
    ]


@case("A43")
def test_a43_a_value_within_the_noise_is_nothing_and_nan_is_a_page(tmp_path: Path) -> None:
    found = replayed(table(tmp_path / "a43.csv", a43()))
    (incident,) = found.incidents
    assert (incident["severity"], incident["verdict"]) == ("critical", "nonfinite")
    assert 3000 < incident["onset_step"] <= incident["opened_step"] == 3010
    assert incident["cause"]["name"] == "numeric"


@case("A43")
@pytest.mark.parametrize(("saved", "target"), [((1000, 2000, 3000), 2000), ((3000,), 3000)])
def test_a43_an_older_checkpoint_is_preferred_to_the_one_right_before_the_nan(
    saved: tuple[int, ...], target: int
) -> None:
    log = [(step, {"loss": row["loss"]}) for step, row in a43()]
    before = rows(910, 2910, steady(3.98, 0.09), stride=10)
    evaluated = (3000, "evaluation", {"loss": 4.0427})
    early = [Event(kind="checkpoint", time=0.0, step=step, fields=checkpoint(step, finite=True)[2]) for step in saved]
    found = judge(
        [*before, *log],
        stride=10,
        events={0: [one for one in early if (one.step or 0) < 3000]},
        changes=[evaluated, *(checkpoint(step, finite=True) for step in saved if step == 3000)],
        said={0: {"betas": [0.9, 0.95]}},
    )
    (incident,) = found.pages
    assert [one["verdict"] for one in found.told] == ["nonfinite"]
    assert (incident["action"], incident["plan"]["target"]["step"]) == ("rollback", target)
    if target == 3000:
        assert "10 steps before" in incident["plan"]["reasons"]["target"]
        assert incident["held_by"] == "approval"
