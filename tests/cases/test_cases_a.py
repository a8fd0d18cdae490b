"""Cases of category a, spikes with a cause: the input is built as the case says, the verdict is the case's."""

from __future__ import annotations

import math

import numpy as np

from tests.cases.build import Row, judge, rows, steady
from tests.cases.registry import case

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
}


@case("A01")
def test_a01_a_spike_of_which_the_gradient_tells_first_heals_without_an_action() -> None:
    def make(step: int, chance: np.random.Generator) -> Row:
        loss, norm = 2.2 + 0.02 * float(chance.normal()), abs(0.2 + 0.05 * float(chance.normal()))
        if step in LOG_A01:
            loss, norm = LOG_A01[step]
        elif 31222 < step < 31250:
            share = (step - 31222) / 28
            loss = 2.2 + 0.6 * (0.02 / 0.6) ** share
            norm = 650.0 * (0.267 / 650.0) ** share
        return {"loss": loss, "grad_norm": norm, "lr": 5.279e-5}

    found = judge(rows(30714, 31600, make))
    (incident,) = found.told
    assert 31215 <= incident["onset_step"] <= incident["opened_step"] <= 31217
    assert incident["state"] == "recovered"
    assert incident["severity"] == "warning"
    assert incident["action"] == "none"
    assert incident["verdict"] == "transient_spike"
    assert incident["cause"]["name"] != "data"


@case("A03")
def test_a03_a_divergence_at_the_end_of_the_warm_up_is_a_page() -> None:
    climb = {6900: 6.365808, 6910: 6.598378, 6920: 7.314456, 6930: 9.121927}

    def make(step: int, chance: np.random.Generator) -> Row:
        loss = climb.get(step, 10.23865 if step > 6930 else 6.4)
        return {"loss": loss + 0.04 * float(chance.normal()), "lr": 6e-5}

    found = judge(rows(3000, 8500, make, stride=10), stride=10)
    page = found.pages[0]
    assert 6890 <= page["onset_step"] <= 6920
    assert page["verdict"] in ("divergence", "level_shift")


@case("A04")
def test_a04_the_suspect_batch_is_that_of_the_gradient_and_not_that_of_the_loss() -> None:
    bad = {11447: (3.114286, 262623.331), 11448: (7.71234, 254699.302)}

    def make(step: int, chance: np.random.Generator) -> Row:
        loss, norm = 3.08 + 0.03 * float(chance.normal()), abs(13000 + 1500 * float(chance.normal()))
        loss, norm = bad.get(step, (loss, norm))
        if step > 11448:
            loss += 4.5 * math.exp(-(step - 11448) / 400)
        return {"loss": loss, "grad_norm": norm, "lr": 3e-5}

    found = judge(rows(10900, 12000, make), samples=432)
    incident = found.told[0]
    assert incident["onset_step"] == 11447
    first, end = incident["suspect_samples"][0]
    assert first <= 11446 * 432 < 11447 * 432 <= end


@case("A11")
def test_a11_a_spike_that_settles_a_little_high_is_a_level_shift_and_a_page() -> None:
    def make(step: int, chance: np.random.Generator) -> Row:
        level = 1.96 - 1e-6 * step
        if 3000 <= step < 3005:
            level = 2.02
        elif step >= 3005:
            level = 1.975 - 1e-6 * step
        return {"loss": level + 0.008 * float(chance.normal())}

    found = judge(rows(1, 4500, make))
    (page,) = found.pages
    assert page["verdict"] == "level_shift"
    assert page["state"] != "recovered"


@case("A13")
def test_a13_a_masked_nan_is_one_numeric_page_and_no_convergence() -> None:
    healthy = rows(1, 300, steady(0.2, 0.03, grad_norm=(1.0, 0.1)))
    broken: list[tuple[int, Row]] = [(301, {"loss": 0.2051, "grad_norm": math.nan})]
    broken += [(step, {"loss": 0.0, "grad_norm": math.nan}) for step in range(302, 502)]
    found = judge([*healthy, *broken])
    (incident,) = found.incidents
    assert incident["severity"] == "critical"
    assert incident["onset_step"] == 301
    assert incident["verdict"] == "nonfinite"
    assert "masked_nonfinite" in found.kinds


@case("A15")
def test_a15_skips_of_a_scaler_within_an_averaged_window_page_nobody() -> None:
    def make(step: int, chance: np.random.Generator) -> Row:
        nan = step in (2400, 2500)
        norm = math.nan if nan else abs(2.7 + 0.3 * float(chance.normal()))
        loss = 2.6 + 0.12 * float(chance.normal())
        return {"loss": loss, "grad_norm": norm, "loss_scale": 512.0 if nan else 1024.0, "skipped": float(nan)}

    found = judge(rows(200, 3000, make, stride=10), stride=10)
    assert found.told == []


@case("A17")
def test_a17_a_batch_without_targets_is_a_matter_of_the_data() -> None:
    def make(step: int, chance: np.random.Generator) -> Row:
        empty = step in (400, 450)
        loss = math.nan if empty else 1.83 + 0.03 * float(chance.normal())
        tokens = 0.0 if empty else float(chance.integers(1800, 2048))
        return {"loss": loss, "batch_supervised_tokens": tokens, "grad_norm": 1 + 0.1 * float(chance.normal())}

    found = judge(rows(1, 600, make))
    assert found.told[0]["cause"]["name"] == "data"


@case("A18")
def test_a18_a_nan_behind_a_running_mean_pages_by_the_counter() -> None:
    def make(step: int, chance: np.random.Generator) -> Row:
        broken = step >= 400
        loss = 1.91 if broken else 1.91 + 0.02 * float(chance.normal())
        return {"loss": loss, "nonfinite": {"loss": float(broken), "grad": float(broken)}}

    found = judge(rows(1, 480, make))
    (page,) = found.pages
    assert page["verdict"] == "nonfinite"
    assert page["onset_step"] == 400
    assert "repeated_signal" in found.kinds


@case("A29")
def test_a29_bumps_at_each_border_of_a_shard_are_periodic_and_page_nobody() -> None:
    def make(step: int, chance: np.random.Generator) -> Row:
        since = step % 1000
        bump = 0.4 * math.exp(-since / 10) if since < 30 and step > 900 else 0.0
        return {"loss": 1.5 + bump + 0.01 * float(chance.normal())}

    found = judge(rows(1, 9500, make))
    assert found.pages == []
    assert found.told[-1]["verdict"] == "periodic_spikes"
    assert found.told[-1]["opened_step"] <= 5100


@case("A30")
def test_a30_a_loss_that_is_logged_times_eight_after_a_restart_is_no_spike() -> None:
    before = rows(1, 1000, steady(2.1, 0.02))
    after = rows(1001, 1400, steady(16.8, 0.16), seed=1)
    found = judge(before, after)
    assert found.told == []
    assert "logging_scale_change" in found.kinds


@case("A43")
def test_a43_a_value_within_the_noise_is_nothing_and_nan_is_a_page() -> None:
    noisy = [3.9883, 3.9408, 3.9994, 4.0977, 4.1535, 3.9453, 3.8993, 3.8853, 4.249]
    log = [(2920 + 10 * place, {"loss": loss}) for place, loss in enumerate([*noisy, *[math.nan] * 6])]
    found = judge(log, stride=10)
    (incident,) = found.incidents
    assert incident["severity"] == "critical"
    assert incident["verdict"] == "nonfinite"
    assert incident["opened_step"] == 3010
