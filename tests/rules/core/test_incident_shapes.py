"""What a thing is called and what is done about it follows from how long it lasts and the level after it, not from its size."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest

from tests.rules.core.runs import (
    Attempt,
    Change,
    Played,
    acting,
    core,
    default_pack,
    gradients,
    not_a_number,
    only,
    shifted,
    small_pack,
    spike,
)

PACKS = pytest.mark.parametrize("pack", [small_pack, default_pack])


def large_run(step: int, signals: dict[str, Any]) -> None:
    """The noise of a large run late in training (case A01): loss 2.2 sd 0.02, gradient norm 0.2 sd 0.02."""
    chance = np.random.default_rng((5, step))
    signals["loss"] = 2.2 + 0.02 * float(chance.standard_normal())
    signals["grad_norm"] = {"all": 0.2 + 0.02 * float(chance.standard_normal())}


#: Case A01, BigScience 176B: the gradient leads by four steps, the loss peaks at 5.1 and is back after thirty steps.
A01: list[Change] = [
    large_run,
    gradients(
        {31215: 0.6, 31216: 0.947, 31217: 2.39, 31218: 15.9, 31219: 145.0, 31220: 960.0, 31221: 50.0, 31222: 5.0}
    ),
    spike({31219: 2.9, 31220: 2.2, 31221: 1.5, 31222: 1.3}, 31223, 31250),
]


def played(changes: list[Change], pack: Any = small_pack, **values: Any) -> Played:
    found = acting(pack())
    found.play(Attempt(changes=changes, **values), live=True)
    return found


@PACKS
def test_a_spike_that_heals_in_thirty_steps_is_one_incident_without_an_action(pack: Any) -> None:
    source = {"resumed_from": {"attempt": 0, "step": 30599, "path": "x"}}
    found = played(A01, pack, first=30600, last=31500, start=source)
    incident = only(found.incidents)
    assert incident["onset_step"] in range(31215, 31218)
    assert incident["opened_step"] < 31219 < incident["confirmed_step"] < 31225
    assert (incident["state"], incident["action"], incident["severity"]) == ("recovered", "none", "warning")
    assert incident["verdict"] == "transient_spike"
    assert incident["cause"]["name"] == "undetermined"
    assert incident["cheapest_test"]
    assert found.rollbacks == []


def test_a_thousand_nan_records_are_one_incident_that_waits_for_a_person_where_no_checkpoint_is_old_enough() -> None:
    found = played([not_a_number(400)], last=1500)
    incident = only(found.incidents)
    assert (incident["verdict"], incident["severity"], incident["onset_step"]) == ("nonfinite", "critical", 400)
    assert incident["cause"]["name"] == "numeric"
    # One memory of the second moment is a thousand steps at beta2 0.999: the newest one before the onset, with a reset.
    assert incident["plan"]["target"]["step"] == 350
    assert incident["plan"]["reset_optimizer"]
    assert incident["held_by"] == "approval"


def test_nan_weights_are_rolled_back_to_a_checkpoint_older_than_the_second_moments_memory() -> None:
    found = played([not_a_number(400)], last=420, start={"beta2": 0.98, "betas": [0.9, 0.98]}, end=None)
    incident = only(found.incidents)
    assert incident["plan"]["target"]["step"] == 300  # 400 - 1 - 50, and older
    assert incident["state"] == "acting"
    assert incident["plan"]["rewarmup_steps"] > 0
    assert incident["plan"]["checks"]["optimizer_step"] == 1


def test_one_nan_step_that_passes_is_not_rolled_back() -> None:
    found = played([spike({400: math.nan})], last=600)
    incident = only(found.incidents)
    assert (incident["state"], incident["verdict"], incident["action"]) == ("recovered", "nonfinite", "none")


@PACKS
def test_a_loss_that_settles_high_for_good_is_a_level_shift_and_a_page(pack: Any) -> None:
    found = played([spike({800: 0.8, 801: 0.8, 802: 0.6, 803: 0.4}), shifted(800, 0.06)], pack, last=1500)
    incident = only(found.incidents)
    assert (incident["verdict"], incident["state"], incident["severity"]) == ("level_shift", "escalated", "critical")
    assert found.rollbacks == []


def test_a_loss_that_runs_away_for_no_known_cause_asks_before_it_goes_back() -> None:
    def runs_away(step: int, signals: dict[str, Any]) -> None:
        if step >= 700:
            signals["loss"] += 0.02 * (step - 700)
            signals["grad_norm"]["all"] *= min(1 + 0.2 * (step - 700), 40)

    incident = only(played([runs_away], last=830, end=None).incidents)
    assert incident["verdict"] == "divergence"
    assert incident["cause"]["name"] == "undetermined"
    assert (incident["state"], incident["held_by"]) == ("awaiting_approval", "approval")
    assert incident["plan"]["skip_samples"] == []
    assert incident["plan"]["lr_factor"] == 1.0


def test_a_jump_of_the_learning_rate_is_named_and_halved() -> None:
    def jump(step: int, signals: dict[str, Any]) -> None:
        if step >= 700:
            signals["lr"] = {"all": signals["lr"]["all"] * 4}
        if step >= 705:
            signals["loss"] += min(0.05 * (step - 704), 3.0)
            signals["grad_norm"]["all"] *= 5

    incident = only(played([jump], last=830, end=None).incidents)
    assert incident["cause"]["name"] == "learning_rate"
    assert incident["plan"]["lr_factor"] == 0.5
    assert incident["plan"]["skip_samples"] == []


def test_a_surge_of_the_gradient_alone_is_called_that_and_passes() -> None:
    incident = only(played([gradients({500: 9.0, 501: 9.0})], last=700).incidents)
    assert (incident["verdict"], incident["state"], incident["confirmed_step"]) == ("grad_surge", "recovered", None)


def test_alerts_that_fire_again_before_it_healed_join_the_incident() -> None:
    peaks = {step: 1.5 for first in (700, 730, 760) for step in range(first, first + 4)}
    incident = only(played([spike(peaks)], last=1000).incidents)
    assert incident["state"] == "recovered"
    assert incident["closed_step"] >= 763 + 50


def test_alerts_that_fire_long_after_it_healed_are_another_incident() -> None:
    peaks = {step: 1.5 for first in (700, 900) for step in range(first, first + 4)}
    first, second = played([spike(peaks)], last=1100).incidents
    assert first["id"] != second["id"]
    assert first["closed_step"] < second["onset_step"]


def test_dirty_data_that_ends_and_heals_before_a_rollback_is_only_reported() -> None:
    def five_steps(step: int, signals: dict[str, Any]) -> None:
        if 500 <= step < 505:
            signals["loss"] += 1.5
            signals["grad_norm"]["all"] *= 5
            signals["batch_longest_repeat_tokens"] = 400.0

    found = played([five_steps], last=800)
    incident = only(found.incidents)
    assert (incident["cause"]["name"], incident["action"], incident["state"]) == ("data", "none", "recovered")
    assert incident["suspect_samples"] == [[499 * 16, 504 * 16]]


def test_an_odd_fingerprint_without_harm_is_no_incident() -> None:
    def odd(step: int, signals: dict[str, Any]) -> None:
        if 500 <= step < 550:
            signals["batch_longest_repeat_tokens"] = 400.0

    assert played([odd], last=800).incidents == []


def test_empty_targets_explain_a_nan_by_the_data() -> None:
    def empty(step: int, signals: dict[str, Any]) -> None:
        signals["batch_supervised_tokens"] = 4096.0 + step % 3
        if step == 500:
            signals["loss"] = math.nan
            signals["batch_supervised_tokens"] = 0.0

    incident = only(played([empty], last=600).incidents)
    assert incident["cause"]["name"] == "data"


def test_the_rank_whose_loss_alone_stands_out_is_named() -> None:
    from trainwarden.rules.core.inputs import Happened, Steps

    found = core()
    attempt = Attempt(changes=[spike({500: 2.0, 501: 2.0, 502: 2.0, 503: 2.0})], last=520, world_size=8)
    lines = list(attempt.lines())
    for rank in range(8):
        found.take(Happened(attempt.who, rank, lines[0]))  # type: ignore[arg-type]
    calm = Attempt(last=520, world_size=8)
    for step in range(1, 521):
        for rank in range(8):
            source = attempt if rank in (0, 5) else calm
            record = source.record(step, step + 1)
            own = record.signals["loss"] if rank == 5 else calm.record(step, 1).signals["loss"]
            record.signals["rank_loss"] = float(own) + 0.01 * rank  # type: ignore[arg-type]
            found.take(Steps(attempt.who, rank, (record,)))
    assert only(found.incidents)["scope"]["ranks"] == [5]


def test_a_lasting_piece_of_information_does_not_swallow_a_graver_alert_that_comes_much_later() -> None:
    from trainwarden.rules.core.language import load_pack

    rules = """
groups:
  - name: g
    rules:
      - {alert: Known, expr: "lr > 0", labels: {severity: info, verdict: other}}
      - {alert: Spike, expr: "loss / ema(loss, beta=0.98) > 1.5", for: 3 steps, labels: {severity: warning}}
"""
    found = core(load_pack(rules, "rules.yml"))
    found.play(Attempt(changes=[spike({500: 4.0, 501: 4.0, 502: 4.0})], last=600))
    first, second = found.incidents
    assert (first["severity"], first["state"]) == ("info", "recovered")
    assert (second["severity"], second["onset_step"]) == ("warning", 500)
    assert next(sent.body["event"] for sent in found.sent("notify")) == "opened"
    assert {sent.incident for sent in found.sent("notify")} == {second["id"]}
