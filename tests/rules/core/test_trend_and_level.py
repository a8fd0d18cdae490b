"""A trend is extrapolated with an honest error, and a level is compared with it, not with a threshold."""

from __future__ import annotations

import math

import numpy as np
import pytest

from tests.rules.core.made_up_facts import facts
from tests.rules.core.runs import healthy_loss, shifted, spike
from trainwarden.rules.core.baseline import above, baseline, below, quantum
from trainwarden.rules.core.healing import level
from trainwarden.rules.core.trend import fit, shift


def curve(first: int, end: int, seed: int = 0, noise: float = 0.03) -> tuple[np.ndarray, np.ndarray]:
    steps = np.arange(first, end)
    return steps, np.array([healthy_loss(int(step), seed, noise) for step in steps])


@pytest.mark.parametrize("seed", range(20))
def test_a_healthy_curve_stays_within_three_errors_of_its_own_extrapolation(seed: int) -> None:
    trend = fit(*curve(140, 350, seed))
    assert trend is not None
    found = shift(trend, *curve(400, 600, seed))
    assert found is not None
    assert found.excess < max(3 * found.error, 0.5 * trend.noise)


@pytest.mark.parametrize("seed", range(10))
def test_a_curve_that_settled_eight_percent_high_does_not(seed: int) -> None:
    trend = fit(*curve(140, 350, seed))
    steps, losses = curve(400, 600, seed)
    assert trend is not None
    found = shift(trend, steps, 1.08 * losses)
    assert found is not None
    assert found.excess > max(3 * found.error, 0.5 * trend.noise)


def test_one_spike_in_the_window_does_not_move_the_trend() -> None:
    steps, losses = curve(140, 350)
    calm, spiky = fit(steps, losses), fit(steps, np.where((steps > 200) & (steps < 206), losses + 5, losses))
    assert calm is not None
    assert spiky is not None
    assert abs(calm.at(steps)[-1] - spiky.at(steps)[-1]) < 0.01
    assert spiky.noise < 1.2 * calm.noise


def test_correlated_noise_counts_for_less() -> None:
    chance = np.random.default_rng(0)
    steps = np.arange(1000, 1400)
    white = chance.standard_normal(400)
    slow = np.convolve(chance.standard_normal(420), np.ones(20) / math.sqrt(20))[:400]
    one, other = fit(steps, 2 + 0.02 * white), fit(steps, 2 + 0.02 * slow)
    assert one is not None
    assert other is not None
    assert other.correlation > 4 * one.correlation


def test_too_few_or_no_finite_values_give_no_trend_and_no_baseline() -> None:
    assert fit(np.arange(15), np.ones(15)) is None
    assert fit(np.arange(50), np.full(50, np.nan)) is None
    assert baseline(np.ones(5)) is None


def test_a_quantised_loss_never_has_less_noise_than_half_a_quantum() -> None:
    """Case B01: a loss logged in bf16."""
    values = np.full(60, 1.6875)
    values[::7] = 1.6953
    assert quantum(values) == pytest.approx(0.0078)
    found = baseline(values)
    assert found is not None
    assert found.noise >= 0.0039


def test_a_constant_signal_is_above_itself_only_when_it_moves() -> None:
    usual = baseline(np.ones(50))
    assert usual is not None
    assert not above(np.ones(3), usual, 6, 1.5).any()
    assert above(np.array([1.6, math.nan, math.inf]), usual, 6, 1.5).all()
    assert below(np.array([0.1, math.nan]), usual, 6, 0.5).tolist() == [True, False]


def test_a_spike_that_is_over_is_back_on_its_level() -> None:
    found = facts(spike({301: 3.0, 302: 2.0}), last=400)
    assert level(found, 305, 200) == "back"


def test_a_level_that_stays_high_is_high_and_then_settled() -> None:
    assert level(facts(shifted(301, 0.3), last=400), 305, 200) == "high"
    assert level(facts(shifted(301, 0.3), last=600), 305, 200) == "settled"


def test_a_level_that_comes_down_slowly_is_not_settled() -> None:
    def slowly(step: int, signals: dict) -> None:  # type: ignore[type-arg]
        if step >= 301:
            signals["loss"] += 1.5 * math.exp(-(step - 301) / 150)

    assert level(facts(slowly, last=540), 305, 200) == "high"


def test_a_small_permanent_step_at_the_end_of_a_long_run_is_seen() -> None:
    """Case A11: 1.960 to 1.975 with a noise of 0.008, below any threshold."""

    def late(step: int, signals: dict) -> None:  # type: ignore[type-arg]
        signals["loss"] = 1.96 + 0.008 * float(np.random.default_rng((9, step)).standard_normal())
        if step >= 100_000:
            signals["loss"] += 0.015

    found = facts(late, first=99_000, onset=100_000, last=100_300)
    assert level(found, 100_010, 200) == "settled"
