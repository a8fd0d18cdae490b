"""What a rule says is looked at: a large ratio of nothing is no spike, and an alert that is over has not lasted."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from tests.cases.build import judge, rows
from tests.rules.core.runs import Attempt, core, default_pack, gradients, small_pack, spike
from trainwarden.rules.core.language import load_pack

INFO = """
groups:
  - name: test
    rules:
      - alert: Odd
        expr: loss > 3
        labels: {severity: info, verdict: outlier}
"""


@pytest.mark.parametrize("seed", range(2))
def test_a_loss_around_zero_that_is_many_times_its_average_is_information(seed: int) -> None:
    chance = np.random.default_rng(seed)

    def policy(step: int, signals: dict[str, Any]) -> None:
        signals["loss"] = 0.02 * float(chance.standard_normal()) + 0.01
        signals["grad_norm"] = {"all": 1.0 + 0.1 * float(chance.random())}

    played = core(pack=default_pack())
    played.play(Attempt(last=1000, changes=[policy]))
    assert any("TrainingLossSpike" in row["alerts"] for row in played.incidents)
    # Before there is a trend nothing is known of the noise.
    assert [row["summary"] for row in played.incidents if row["severity"] != "info" and row["opened_step"] > 60] == []


def test_a_loss_that_leaves_its_noise_is_a_warning_at_once() -> None:
    played = core(pack=default_pack())
    played.play(Attempt(changes=[spike(dict.fromkeys(range(300, 312), 3.0))]))
    (row,) = [row for row in played.incidents if row["severity"] != "info"]
    assert row["severity"] == "warning"
    assert abs(row["opened_step"] - 301) <= 2


def test_an_alert_of_one_step_has_not_lasted_however_long_before_its_onset_lies() -> None:
    # The gradient was odd thirty steps before: the onset is there, and the alert held for one step.
    played = core(pack=load_pack(INFO, "test.yml"))
    played.play(Attempt(changes=[gradients(dict.fromkeys(range(270, 301), 20.0)), spike({300: 3.0})]))
    row = max(played.incidents, key=lambda one: int(one["opened_step"]))
    assert row["onset_step"] < 300 - 20
    said = [entry["says"] for entry in row["timeline"]]
    assert not any("has lasted" in says for says in said), said
    assert row["confirmed_step"] is None


def test_an_alert_that_goes_on_has_lasted() -> None:
    played = core(pack=small_pack())
    played.play(Attempt(changes=[gradients(dict.fromkeys(range(300, 340), 20.0))]))
    (row,) = played.incidents
    assert any("It has lasted" in entry["says"] for entry in row["timeline"])


def test_a_coarse_log_that_runs_away_is_a_divergence_although_it_tells_no_noise() -> None:
    # A record every hundred steps: within fifty steps there is one.
    def make(step: int, chance: np.random.Generator) -> dict[str, Any]:
        return {"loss": 3.0 + 0.02 * float(chance.normal()) + (1.5 if step > 6000 else 0.0)}

    (page,) = judge(rows(100, 6500, make, stride=100), stride=100).pages
    assert "TrainingDivergence" in page["alerts"]
    assert page["confirmed_step"] <= 6300
