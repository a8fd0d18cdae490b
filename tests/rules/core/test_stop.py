"""A run that never learned anything and has nowhere to go back to is stopped (case C06): from the decision to the receiver's word."""

from __future__ import annotations

import math
from typing import Any

import msgspec
import pytest

from tests.rules.core.runs import Attempt, Played, acting, core, only
from trainwarden import webhook
from trainwarden.record import Event
from trainwarden.rules.core.inputs import Command, Happened, Receipt, Tick
from trainwarden.rules.report.words import decision, todo


def dead(scale: float | None = 0.0, first: int = 1, last: int = 10_000) -> Any:
    def change(step: int, signals: dict[str, Any]) -> None:
        if first <= step <= last:
            signals["loss"] = math.nan
            if scale is not None:
                signals["loss_scale"] = scale

    return change


ATTEMPT = Attempt(changes=[dead()], end=None)
STOP = "training.stop.requested"


def stopping(**settings: Any) -> Played:
    played = acting(**settings)
    played.play(ATTEMPT, live=True, upto=20)
    return played


def test_c06_is_stopped_within_its_first_records() -> None:
    played = stopping()
    sent = only(played.sent(of_type=STOP))
    row = only(played.incidents)
    assert (row["action"], row["severity"], row["state"], row["done"]) == ("stop", "critical", "acting", "requested")
    assert row["confirmed_step"] <= 6
    assert sent.key == webhook.request_id("uid", 0, "stop", 0)
    assert played.rollbacks == []


def test_the_request_is_one_that_a_receiver_takes() -> None:
    body = msgspec.json.encode(only(stopping().sent(of_type=STOP)).body)
    envelope = webhook.decode_envelope(body)
    assert (envelope.action, envelope.data.plan.action, envelope.data.plan.for_attempt) == ("stop", "stop", 1)
    assert envelope.data.plan.target is None
    assert "nothing was learned" in envelope.data.plan.reasons["action"]


def test_people_read_why_and_what_to_do() -> None:
    row = only(stopping().incidents)
    says = decision(row)
    assert says.startswith("Decided: stop the run. The loss scale is 0 and no loss was ever a number")
    played = stopping(mode="observe")
    row = only(played.incidents)
    assert (row["action"], row["held_by"]) == ("stop", "mode")
    assert "Held back (mode)" in decision(row)
    assert todo(row)


def test_a_stop_that_was_done_is_handed_to_a_person() -> None:
    played = stopping()
    key = only(played.sent(of_type=STOP)).key
    played.take(Receipt(key, "accepted", ATTEMPT.time(21)))
    assert only(played.incidents)["state"] == "acting"
    played.take(Receipt(key, "executed", ATTEMPT.time(22)))
    row = only(played.incidents)
    assert (row["state"], row["done"], row["action"]) == ("escalated", "executed", "stop")
    assert todo(row) == "Look at it now."


@pytest.mark.parametrize("status", ["refused", "expired", "failed", "undeliverable"])
def test_a_stop_that_came_to_nothing_is_handed_to_a_person(status: Any) -> None:
    played = stopping()
    played.take(Receipt(only(played.sent(of_type=STOP)).key, status, ATTEMPT.time(22), reason="stale"))
    row = only(played.incidents)
    assert (row["state"], row["done"], row["severity"]) == ("escalated", status, "critical")


def test_a_stop_of_which_nobody_says_anything_is_handed_over_in_the_end() -> None:
    played = stopping()
    played.take(Tick(ATTEMPT.time(20) + 3000))
    row = only(played.incidents)
    assert row["state"] == "escalated"
    assert "The stop was requested and nobody said that it was done." in row["timeline"][-1]["says"]


def test_an_attempt_that_begins_though_the_run_was_to_be_stopped_is_said_and_is_no_mismatch() -> None:
    played = stopping()
    played.take(
        Happened(ATTEMPT.who, 0, Event(kind="exit", time=ATTEMPT.time(21), seq=99, fields={"reason": "signal"}))
    )
    played.play(Attempt(number=1, changes=[], last=60, began=ATTEMPT.time(30)))
    row = played.incidents[0]
    assert (row["state"], row["verdict"]) == ("escalated", "nonfinite")
    assert "though the run was to be stopped" in row["timeline"][-1]["says"]


def test_a_stop_that_waits_is_taken_back_when_the_loss_becomes_a_number() -> None:
    played = acting(mode="approve")
    recovering = Attempt(changes=[dead(last=30)], last=80, end=None)
    played.play(recovering, live=True, upto=30)
    waiting = only(played.incidents)
    assert (waiting["action"], waiting["state"], waiting["held_by"]) == ("stop", "awaiting_approval", "approval")
    played.play(recovering)
    row = only(played.incidents)
    assert (row["action"], row["plan"], row["held_by"]) == ("none", None, None)
    played.take(Command("approve", "ann", recovering.time(81), row["id"], waiting["plan"]["plan_id"]))
    assert played.sent(of_type=STOP) == []


@pytest.mark.parametrize(
    "attempt",
    [
        Attempt(changes=[dead(first=2)], end=None, checkpoint_every=0),  # it learned for a step
        Attempt(changes=[dead(scale=65536.0)], end=None, checkpoint_every=0),  # a scaler that looks for its scale
        Attempt(changes=[dead()], end=None, start={"resumed_from": {"attempt": 0, "step": 0, "path": "x"}}),
    ],
)
def test_what_learned_or_may_yet_is_not_stopped_in_its_first_steps(attempt: Attempt) -> None:
    played = acting()
    played.play(attempt, live=True, upto=20)
    assert played.sent(of_type=STOP) == []
    assert {row["action"] for row in played.incidents} <= {"none"}


def test_without_a_dead_scale_it_is_stopped_behind_the_warm_up() -> None:
    played = acting()
    played.play(Attempt(changes=[dead(scale=None)], end=None, checkpoint_every=0), live=True, upto=70)
    row = only(played.incidents)
    assert row["action"] == "stop"
    assert len(played.sent(of_type=STOP)) == 1


def test_a_replay_decides_what_the_live_run_decided() -> None:
    replayed = core(mode="act")
    replayed.play(ATTEMPT, chunk=7, upto=20)
    row, live = only(replayed.incidents), only(stopping().incidents)
    assert (row["action"], row["plan"], row["held_by"]) == ("stop", live["plan"], "no_receiver")
