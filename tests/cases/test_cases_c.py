"""Cases of category c, the loss scale: a collapse is a page before the run ends, and a standstill is one too."""

from __future__ import annotations

import math

import numpy as np

from tests.cases.build import Row, judge, rows
from tests.cases.registry import case


@case("C01")
def test_c01_a_scale_that_falls_to_its_floor_is_a_page_at_the_fifth_halving() -> None:
    def make(step: int, chance: np.random.Generator) -> Row:
        if step < 10199:
            loss = 6.343 + 0.05 * float(chance.normal())
            return {"loss": loss, "grad_norm": 0.39 + 0.03 * float(chance.normal()), "loss_scale": 0.5, "skipped": 0.0}
        return {"loss_scale": 0.5 * 2.0 ** -(step - 10198), "skipped": 1.0}

    found = judge(rows(9700, 10210, make))
    (page,) = found.pages
    assert page["verdict"] == "scale_collapse"
    assert page["opened_step"] == 10203


@case("C03")
def test_c03_steps_without_updates_at_the_floor_are_a_stall_and_a_page() -> None:
    def make(step: int, chance: np.random.Generator) -> Row:
        stuck = step > 300
        row: Row = {"loss": 2.31 + 0.01 * float(chance.normal()), "loss_scale": 0.03125}
        return row | {"skipped": float(stuck), "optimizer_step": float(min(step, 300))}

    found = judge(rows(1, 800, make))
    (page,) = found.pages
    assert page["verdict"] == "stall"
    assert page["opened_step"] <= 500


@case("C04")
def test_c04_nan_gradients_without_a_loss_and_without_a_scaler_are_a_page() -> None:
    log: list[tuple[int, Row]] = [(step, {"grad_norm": math.nan, "skipped": 0.0}) for step in range(5426, 5500)]
    (page,) = judge(log).pages
    assert page["verdict"] == "nonfinite"
    assert page["opened_step"] == 5426


@case("C06")
def test_c06_a_scale_of_zero_and_a_loss_that_is_none_are_fatal_from_the_first_record() -> None:
    log: list[tuple[int, Row]] = [(step, {"loss": math.nan, "loss_scale": 0.0}) for step in range(20, 400, 10)]
    found = judge(log, stride=10)
    (incident,) = found.incidents
    assert incident["severity"] == "critical"
    assert incident["opened_step"] == 20
    assert incident["action"] in ("stop", "escalate")
