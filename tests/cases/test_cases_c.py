"""Cases of category c, the loss scale: a collapse is a page before the run ends, and a standstill is one too."""

from __future__ import annotations

import math

import numpy as np
import pytest

from tests.cases.build import Row, judge, rows
from tests.cases.registry import case


def falling(step: int, chance: np.random.Generator, first: float = 0.5, skipped: bool = True) -> Row:
    """Case C01: a healthy loss up to step 10198, then one halving of the scale a step, and no loss."""
    if step < 10199:
        loss = 6.343 + 0.05 * float(chance.normal())
        row: Row = {"loss": loss, "grad_norm": 0.39 + 0.03 * float(chance.normal()), "loss_scale": first, "lr": 6.26e-4}
        return row | ({"skipped": 0.0} if skipped else {})
    return {"loss_scale": first * 2.0 ** -(step - 10198)} | ({"skipped": 1.0} if skipped else {})


@case("C01")
@pytest.mark.parametrize("skipped", [True, False])
@pytest.mark.parametrize(("first", "history"), [(0.5, 500), (65536.0, 500), (2.0**20, 120)])
def test_c01_a_scale_that_falls_to_its_floor_is_a_page_at_the_fifth_halving(
    first: float, history: int, skipped: bool
) -> None:
    found = judge(rows(10199 - history, 10210, lambda step, chance: falling(step, chance, first, skipped)))
    (page,) = found.pages
    assert page["verdict"] == "scale_collapse"
    assert page["opened_step"] == 10203
    assert page["cause"]["name"] == "numeric"
    assert page["post_mortem"]["loss_scale"] == first * 2.0**-5  # at the fifth


@case("C01")
def test_c01_the_quoted_rows_alone_are_a_page_before_the_run_ends() -> None:
    log: list[tuple[int, Row]] = [(10198, {"loss": 6.343, "grad_norm": 0.39, "loss_scale": 0.5, "lr": 6.26e-4})]
    log += [(10198 + n, {"loss_scale": 0.5 * 2.0**-n}) for n in range(1, 13)]
    (page,) = judge(log).pages
    assert (page["verdict"], page["opened_step"], page["cause"]["name"]) == ("scale_collapse", 10203, "numeric")


@case("C03")
@pytest.mark.parametrize("stuck_from", [1, 300])
@pytest.mark.parametrize("counts", [True, False])
def test_c03_steps_without_updates_at_the_floor_are_a_stall_and_a_page(stuck_from: int, counts: bool) -> None:
    def make(step: int, chance: np.random.Generator) -> Row:
        row: Row = {"loss": 2.31 + 0.01 * float(chance.normal()), "loss_scale": 0.03125}
        row |= {"skipped": float(step > stuck_from)} if counts else {}
        return row | {"optimizer_step": float(1000 + min(step, stuck_from))}

    found = judge(rows(1, stuck_from + 500, make))
    (page,) = found.pages
    assert page["verdict"] == "stall"
    assert page["opened_step"] <= stuck_from + 200
    assert page["action"] in ("none", "escalate")


@case("C04")
@pytest.mark.parametrize("scale", [None, 1.0])
@pytest.mark.parametrize("first", [5426, 1])
def test_c04_nan_gradients_without_a_loss_are_fatal_whatever_the_framework_counts(
    scale: float | None, first: int
) -> None:
    row: Row = {"grad_norm": math.nan, "skipped": 0.0, "nan_iters": 0.0, "lr": 2.999e-4}
    row |= {} if scale is None else {"loss_scale": scale}
    log: list[tuple[int, Row]] = [(step, dict(row)) for step in range(first, first + 200)]
    saved = (first + 60, "checkpoint", {"step": first + 60, "path": "ckpt", "complete": True})
    (page,) = judge(log, changes=[saved]).pages
    assert page["verdict"] == "nonfinite"
    assert page["opened_step"] == first
    assert page["cause"]["name"] == "numeric"
    assert page["action"] == "stop"  # nothing is learned, and there is nothing to go back to
    assert page["plan"] is None or page["plan"]["target"] is None  # what was saved since is no target
    assert page["post_mortem"]["last_good"] is None


@case("C06")
@pytest.mark.parametrize("scale", [0.0, 1.4e-303, 3.5e-307])
@pytest.mark.parametrize("last", [40, 390])
def test_c06_a_scale_of_zero_and_a_loss_that_is_none_are_fatal_from_the_first_record(scale: float, last: int) -> None:
    rate = {20: 2178.4, 30: 2183.37, 40: 2177.01}
    log: list[tuple[int, Row]] = [
        (step, {"loss": math.nan, "loss_scale": scale, "samples_per_s": rate.get(step, 2180.0)})
        for step in range(20, last + 1, 10)
    ]
    found = judge(log, stride=10)
    (incident,) = found.incidents
    assert incident["severity"] == "critical"
    assert (incident["opened_step"], incident["onset_step"]) == (20, 20)
    assert incident["cause"]["name"] == "numeric"
    assert incident["action"] == "stop"
    assert incident["plan"] is None or incident["plan"]["target"] is None
