"""The default pack on generated streams: silent on a healthy run, awake within three steps of a broken one."""

from __future__ import annotations

import math
from collections.abc import Callable
from importlib.resources import files
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.rules.language.streams import record, run
from trainwarden.record import Step
from trainwarden.rules.core.language import load_pack

TEXT = (files("trainwarden.rules.packs") / "default.yml").read_text(encoding="utf-8")
PACK = load_pack(TEXT, "default.yml")
DOCS = Path(__file__).resolve().parents[2] / "docs" / "rules"

Change = Callable[[int, dict[str, Any]], None]


def stream(seed: int, length: int = 600, change: Change | None = None, stride: int = 1) -> list[Step]:
    """Return a byte-level training: loss 5.5 to about 2, noisy, with a warm-up and a gradient that is spiky at times.

    With a stride, a record holds the mean of so many steps: less noise, and no spike stands out.
    """
    rng = np.random.default_rng(seed)
    noise = stride**-0.5
    steps = []
    for place in range(1, length + 1):
        loss = 2.0 + 1.2 * math.exp(-place / 150) + 2.3 * math.exp(-place / 20) + rng.normal() * 0.15 * noise
        norm = (
            math.exp(rng.normal() * 0.25 * noise)
            * (1 + 6 * math.exp(-place / 15))
            * (1 + noise if rng.random() < 0.01 else 1)
        )
        signals: dict[str, Any] = {
            "loss": loss,
            "grad_norm": {"all": norm, "embedding": norm / 3},
            "nonfinite": {"loss": 0.0, "grad": 0.0, "param": 0.0, "optimizer": 0.0},
            "batch_unique_token_ratio": 0.22 + 0.02 * rng.normal(),
            "batch_longest_repeat_tokens": float(round(24 * math.exp(rng.normal() * 0.4))),
        }
        if change is not None:
            change(place, signals)
        steps.append(record(place * stride, stride, **signals))
    return steps


def fired(steps: list[Step]) -> dict[str, tuple[int, int]]:
    """Return step and since of the first firing of each alert."""
    found: dict[str, tuple[int, int]] = {}
    for change in run(PACK, steps, cuts=range(0, len(steps), 7)):
        if change.state == "firing":
            found.setdefault(change.rule, (change.step, change.since))
    return found


def test_the_three_named_rules_stand_in_the_pack_as_they_are_documented() -> None:
    named = {
        "TrainingLossSpike": ("loss / ema(loss, beta=0.98) > 1.5", "3 steps", "warning", "transient_spike"),
        "TrainingGradCollapse": (
            "grad_norm / median(grad_norm[1000] offset 20) < 0.2 and slope_t(loss[200]) > 2",
            "20 steps",
            "critical",
            "grad_collapse",
        ),
        "TrainingPeriodicSpikes": (
            "period(loss / ema(loss, beta=0.98) > 1.2, window=20000, min_events=4, tolerance=0.1) > 0",
            "0 steps",
            "warning",
            "periodic_spikes",
        ),
    }
    for name, (expr, hold, severity, verdict) in named.items():
        rule = PACK.rules[name]
        assert (rule.expr, str(rule.for_)) == (expr, hold)
        assert dict(rule.labels) == {"severity": severity, "verdict": verdict}


@pytest.mark.parametrize("name", PACK.rules)
def test_every_rule_has_a_page_that_shows_it(name: str) -> None:
    page = (DOCS / f"{name}.md").read_text()
    rule = PACK.rules[name]
    assert page.startswith(f"# {name}\n")
    shown = "".join(page.split())
    assert "".join(rule.expr.split()) in shown
    assert f"severity: {rule.labels['severity']}" in page
    assert rule.annotations["summary"]
    assert rule.annotations["runbook_url"] == f"docs/rules/{name}.md"


def test_every_page_is_of_a_rule() -> None:
    assert {path.stem for path in DOCS.glob("*.md")} == set(PACK.rules)


@pytest.mark.parametrize("stride", [1, 10])
@pytest.mark.parametrize("seed", range(6))
def test_a_healthy_run_is_silent(seed: int, stride: int) -> None:
    assert fired(stream(seed, stride=stride)) == {}


def test_a_long_quiet_run_with_odd_batches_has_no_warning() -> None:
    rng = np.random.default_rng(5)

    def skewed(place: int, signals: dict[str, Any]) -> None:
        signals["loss"] = 3 + 0.04 * rng.standard_gamma(4) + 0.3 * (rng.random() < 0.003) - 0.00002 * place

    severities = {PACK.rules[name].labels["severity"] for name in fired(stream(0, 6000, skewed))}
    assert severities <= {"info"}


@pytest.mark.parametrize("seed", [1, 2, 3])
def test_a_poisoned_shard_is_seen_within_three_steps_and_nothing_before(seed: int) -> None:
    rng = np.random.default_rng(seed)

    def poison(place: int, signals: dict[str, Any]) -> None:
        if 330 <= place < 385:
            signals["loss"] = 4.5 + 0.5 * rng.normal()
            signals["grad_norm"] = {"all": 6.0 + 2 * rng.random() + (25 if place == 331 else 0)}
            signals["batch_unique_token_ratio"] = float(rng.uniform(0.03, 0.7))
            signals["batch_longest_repeat_tokens"] = 129.0

    found = fired(stream(seed, change=poison))
    early = {name: since for name, (step, since) in found.items() if step <= 333}
    assert {"TrainingLossAboveBaseline", "TrainingGradNormSurge", "TrainingDirtyBatch"} <= set(early)
    assert "TrainingLossSpike" in found
    assert min(since for _, since in found.values()) == 330


def at(step: int, **signals: Any) -> Change:
    def change(place: int, given: dict[str, Any]) -> None:
        if place >= step:
            given.update(signals)

    return change


@pytest.mark.parametrize(
    "signals",
    [
        {"loss": math.nan},
        {"loss": math.inf},
        {"nonfinite": {"loss": 0.0, "grad": 0.0, "param": 1.0}},
        {"nonfinite": 1.0},
        {"nonfinite": {"grad": 2.0}, "skipped": 0.0},
        {"grad_norm": {"all": math.nan}},
    ],
)
def test_what_is_not_finite_fires_at_once(signals: dict[str, Any]) -> None:
    assert fired(stream(0, 60, at(50, **signals)))["TrainingNonFinite"] == (50, 50)
    assert PACK.rules["TrainingNonFinite"].labels["severity"] == "critical"


def test_a_gradient_that_the_scaler_found_and_skipped_is_its_work() -> None:
    def scaler(place: int, signals: dict[str, Any]) -> None:
        hit = place % 40 == 0
        signals.update(loss_scale=65536.0, skipped=float(hit), nonfinite={"grad": float(hit)})
        if hit:
            signals["grad_norm"] = {"all": math.inf}

    assert fired(stream(0, 300, scaler)) == {}


def test_nothing_but_a_loss_is_enough_for_the_loss_rules() -> None:
    def bare(place: int, signals: dict[str, Any]) -> None:
        spike = 3.0 if 400 <= place < 410 else 0.0
        loss = signals["loss"] + spike
        signals.clear()
        signals["loss"] = loss

    found = fired(stream(0, change=bare))
    assert found["TrainingLossSpike"] == (402, 400)
    assert set(found) <= {"TrainingLossSpike", "TrainingLossAboveBaseline", "TrainingLossOutlier"}


def test_one_bad_batch_is_noted_and_not_warned_of() -> None:
    def outlier(place: int, signals: dict[str, Any]) -> None:
        signals["loss"] += 2.5 * (place == 400)

    assert fired(stream(0, change=outlier)) == {"TrainingLossOutlier": (400, 400)}


def test_a_loss_that_settles_a_little_higher_is_a_level_shift() -> None:
    rng = np.random.default_rng(0)

    def settled(place: int, signals: dict[str, Any]) -> None:
        signals["loss"] = 1.96 + 0.008 * rng.normal() + 0.015 * (place >= 2000) + 0.05 * (2000 <= place < 2010)

    found = fired(stream(0, 3000, settled))
    assert 2000 < found["TrainingLossLevelShift"][0] < 2400
    assert "TrainingDivergence" not in found


def test_a_loss_that_runs_away_is_a_divergence() -> None:
    def away(place: int, signals: dict[str, Any]) -> None:
        signals["loss"] += 0.02 * max(0, place - 700)

    found = fired(stream(0, 1000, away))
    assert 700 < found["TrainingDivergence"][1] < 760
    assert found["TrainingDivergence"][0] - found["TrainingDivergence"][1] < 101


def test_a_gradient_that_dies_while_the_loss_rises_is_a_collapse() -> None:
    def dying(place: int, signals: dict[str, Any]) -> None:
        if place >= 1000:
            signals["grad_norm"] = {"all": 0.05}
            signals["loss"] += 0.004 * (place - 1000)

    found = fired(stream(0, 1300, dying))
    assert 1019 <= found["TrainingGradCollapse"][0] < 1200


def test_a_gradient_that_gets_small_while_the_loss_falls_is_none() -> None:
    def converged(place: int, signals: dict[str, Any]) -> None:
        if place >= 1000:
            signals["grad_norm"] = {"all": 0.05}
            signals["loss"] -= 0.0005 * (place - 1000)

    assert "TrainingGradCollapse" not in fired(stream(0, 1300, converged))


def test_spikes_at_even_distances_are_periodic_from_the_fourth_on() -> None:
    def periodic(place: int, signals: dict[str, Any]) -> None:
        signals["loss"] = 2.0 + 0.2 * math.exp(-place / 100) + 2.0 * (place >= 500 and place % 250 == 0)

    assert fired(stream(0, 2000, periodic))["TrainingPeriodicSpikes"][0] == 1250
