"""The ladder behind a rollback: what it takes to be recovered, how far back the next one goes, and when a person takes over (design §4.7–8)."""

from __future__ import annotations

import math
from typing import Any

import pytest

from tests.rules.core.runs import (
    Attempt,
    Change,
    Played,
    acting,
    dirty,
    following,
    not_a_number,
    only,
    plan_in,
    shifted,
)


def broken(*changes: Change, **settings: Any) -> Played:
    played = acting(**settings)
    played.play(Attempt(changes=changes or [dirty(351, 400)], end="signal"), live=True, upto=375)
    return played


def says(incident: dict[str, Any]) -> str:
    return "\n".join(line["says"] for line in incident["timeline"])


@pytest.mark.parametrize("first", [320, 430])
def test_weights_that_are_destroyed_while_a_rollback_is_verified_send_the_next_one_further_back(first: int) -> None:
    played = broken(warmup_steps=10, cooldown_steps=10)
    target = plan_in(only(played.incidents)).target
    assert target is not None
    played.play(following(played, 1, not_a_number(first), end=None, last=first + 20), live=True)
    before, after = played.incidents
    assert before["state"] == "not_recovered", says(before)
    assert before["closed_step"] <= first + 5
    assert after["follows"] == before["id"]
    plan = plan_in(after)
    assert plan.target is not None
    assert plan.target.step < target.step
    assert plan.reset_optimizer
    assert "did not help" in plan.reasons["reset_optimizer"]


def test_one_loss_that_is_no_number_on_a_step_that_was_left_out_harms_nothing() -> None:
    def scaled(step: int, signals: dict[str, Any]) -> None:
        if step in (420, 460):
            signals["loss"], signals["skipped"] = math.inf, 1.0
        if step == 440:
            signals["loss"], signals["guard_skipped_steps"] = math.nan, {"nonfinite": 1.0}
        if step > 420 and "optimizer_step" in signals:
            signals["optimizer_step"] -= 1.0

    played = broken()
    played.play(following(played, 1, scaled), live=True)
    assert played.incidents[0]["state"] == "recovered", says(played.incidents[0])


def test_what_the_records_never_told_is_said_with_the_end() -> None:
    def silent(step: int, signals: dict[str, Any]) -> None:
        signals.pop("optimizer_step", None)
        signals.pop("lr", None)

    played = broken()
    attempt = following(played, 1, silent)
    record = attempt.record

    def nowhere(step: int, seq: int) -> Any:
        found = record(step, seq)
        found.samples, found.shards = [], []
        return found

    attempt.record = nowhere  # type: ignore[method-assign]
    played.play(attempt, live=True)
    incident = only(played.incidents)
    assert incident["state"] == "recovered", says(incident)
    assert set(incident["verification"]["checks"]) == {"start_step"}
    assert "learning rate, optimizer's counter, skipped samples" in says(incident)


def test_the_third_window_is_held_against_the_trend_before_and_not_against_the_damage() -> None:
    # The parent was at +0.6 and more; +0.25 looks well beside it, and is not.
    played = broken()
    played.play(following(played, 1, shifted(401, 0.25), end=None, last=620), live=True)
    assert played.incidents[0]["state"] == "not_recovered"
    better = broken()
    better.play(following(better, 1, shifted(401, -0.25), last=620), live=True)
    assert better.incidents[0]["state"] == "recovered"


def test_without_a_loss_in_the_last_window_nothing_is_concluded_and_nothing_done() -> None:
    def lost(step: int, signals: dict[str, Any]) -> None:
        if step > 401:
            del signals["loss"]

    played = broken()
    played.play(following(played, 1, lost, end=None, last=640), live=True)
    incident = played.incidents[0]
    assert incident["state"] == "inconclusive", says(incident)
    assert "1 record after the skip alone; 100 steps are needed" in says(incident)
    assert len(played.rollbacks) == 1


def test_the_number_of_rollbacks_ends_the_ladder_at_a_person() -> None:
    played = broken(max_rollbacks=1)
    played.play(following(played, 1, shifted(401, 0.25), end=None, last=620), live=True)
    last = played.incidents[-1]
    assert (last["state"], last["action"]) == ("escalated", "escalate")
    assert "1 rollbacks did not help" in says(last) or "rollback did not help" in says(last)
    assert len(played.rollbacks) == 1
