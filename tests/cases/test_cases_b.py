"""Cases of category b, false alarms: nothing is said, or something small, where nothing is wrong."""

from __future__ import annotations

import math

import numpy as np
import pytest

from tests.cases.build import Row, judge, rows
from tests.cases.registry import case


@case("B01")
def test_b01_a_loss_rounded_to_bf16_is_said_to_be_so_and_alerts_nobody() -> None:
    def make(step: int, chance: np.random.Generator) -> Row:
        return {"loss": 1.6953 + 0.0078125 * max(-5, min(5, round(1.5 * float(chance.normal()))))}

    found = judge(rows(1, 400, make))
    assert found.incidents == []
    assert found.kinds == ["quantised_loss"]
    assert "0.007812" in found.notices[0]["says"]


#: The eleven values that the run logged.
LOG_B01 = (1.6562, 1.6641, 1.6719, 1.6797, 1.6875, 1.6953, 1.7031, 1.7109, 1.7188, 1.7266, 1.7344)


@case("B01")
@pytest.mark.parametrize("seed", range(3))
def test_b01_the_values_that_were_logged_are_said_to_be_rounded_to_0_0078(seed: int) -> None:
    found = judge(rows(1, 300, lambda step, chance: {"loss": LOG_B01[int(chance.integers(11))]}, seed=seed))
    assert found.incidents == []
    (notice,) = found.notices
    assert (notice["kind"], notice["signal"]) == ("quantised_loss", "loss")
    assert "0.0078" in notice["says"]


@case("B01")
@pytest.mark.parametrize(("level", "quantum"), [(1.6875, 0.0078), (2.5, 0.0156), (0.84375, 0.0039)])
def test_b01_one_step_of_the_rounding_behind_sixty_equal_values_is_nothing(level: float, quantum: float) -> None:
    log: list[tuple[int, Row]] = [(step, {"loss": level}) for step in range(1, 61)]
    found = judge([*log, (61, {"loss": round(level + quantum, 4)})])
    assert found.incidents == []
    (notice,) = [one for one in found.notices if one["kind"] == "quantised_loss"]
    assert notice["step"] == 61
    assert f"{quantum:g}" in notice["says"]


@case("B01")
@pytest.mark.parametrize("second", [1.7, 2.1875, 1.69])
def test_b01_another_value_behind_equal_ones_is_no_rounding(second: float) -> None:
    log: list[tuple[int, Row]] = [(step, {"loss": 1.6875}) for step in range(1, 61)]
    assert "quantised_loss" not in judge([*log, (61, {"loss": second})]).kinds


@case("B06")
def test_b06_the_search_for_a_scale_and_a_skip_in_hundreds_alert_nobody() -> None:
    def make(step: int, chance: np.random.Generator) -> Row:
        scale = 2.0 ** max(11, 17 - step) if step < 500 else 1024.0
        row: Row = {"loss": 4 + 5 * math.exp(-step / 100) + 0.05 * float(chance.normal())}
        row |= {"loss_scale": scale, "skipped": float(step <= 6 or step in (500, 501))}
        return row

    assert judge(rows(1, 800, make)).incidents == []


@case("B06")
@pytest.mark.parametrize(
    ("first", "halvings", "at"),
    [(2.0**32, 25, 1), (2.0**40, 28, 1), (2.0**24, 5, 9), (2.0**29, 1, 3), (65536.0, 12, 2)],
)
@pytest.mark.parametrize("seed", range(2))
def test_b06_a_search_of_any_length_at_the_start_is_none_and_the_same_at_each_restart(
    first: float, halvings: int, at: int, seed: int
) -> None:
    def make(since: int, step: int, chance: np.random.Generator) -> Row:
        found = min(max(step - since - at + 1, 0), halvings)
        skipped = at <= step - since < at + halvings or bool(chance.random() < 0.005)
        loss = 4 + 5 * math.exp(-step / 100) + 0.05 * float(chance.normal())
        return {"loss": loss, "loss_scale": first * 0.5**found, "skipped": float(skipped)}

    attempts = [
        rows(since + 1, since + 500, lambda step, chance, of=since: make(of, step, chance), seed=seed)
        for since in (0, 400)
    ]  # type: ignore[misc]
    assert judge(*attempts).told == []


@case("B06")
def test_b06_the_quoted_rows_with_a_running_count_of_skipped_steps_are_none() -> None:
    quoted = {1: 1, 2: 2, 3: 3, 4: 4, 10: 6, 500: 7, 501: 8, 510: 8}
    scale = {1: 65536.0, 2: 32768.0, 3: 16384.0, 4: 8192.0, 10: 2048.0, 500: 2048.0, 501: 1024.0, 510: 1024.0}
    log: list[tuple[int, Row]] = [
        (step, {"loss": 4.0, "loss_scale": scale[step], "skipped": float(count)}) for step, count in quoted.items()
    ]
    assert judge(log).told == []


@case("B09")
@pytest.mark.parametrize("height", [0.8, 5.0])
def test_b09_a_large_spike_hides_no_small_one_behind_it(height: float) -> None:
    def make(step: int, chance: np.random.Generator) -> Row:
        spike = 5.0 if 1000 <= step < 1003 else height if 1060 <= step < 1063 else 0.0
        return {"loss": 2 + spike + 0.02 * float(chance.normal())}

    found = judge(rows(1, 1400, make))
    assert [one["onset_step"] for one in found.told] == [1000, 1060]
    assert found.pages == []


@case("B11")
def test_b11_a_cool_down_is_nothing_and_a_spike_within_it_is_seen() -> None:
    def make(step: int, chance: np.random.Generator) -> Row:
        down = max(0, step - 5000) / 1000
        spike = 0.1 if 5800 <= step < 5820 else 0.0
        row: Row = {"loss": 2.6 - 0.25 * down + spike + 0.012 * float(chance.normal())}
        return row | {"lr": 1e-3 * (1 - down) + 1e-9}

    found = judge(rows(1, 6000, make))
    (incident,) = found.told
    assert 5799 <= incident["onset_step"] <= 5802
    assert incident["severity"] == "warning"


@case("B13")
def test_b13_a_gradient_that_grows_over_the_whole_run_is_a_drift_and_no_page() -> None:
    def make(step: int, chance: np.random.Generator) -> Row:
        norm = (0.5 + 1.5 * step / 200_000) * math.exp(0.1 * float(chance.normal()))
        return {"loss": 2.5 + 0.02 * float(chance.normal()), "grad_norm": norm}

    found = judge(rows(20, 200_000, make, stride=20), stride=20)
    assert [one["verdict"] for one in found.told] == ["drift"]
    assert found.pages == []
