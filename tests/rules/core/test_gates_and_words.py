"""Nothing is delivered through a shut gate, and a person's word counts for the plan that was shown."""

from __future__ import annotations

from typing import Any

import pytest

from tests.rules.core.runs import BEGIN, Attempt, Played, acting, core, dirty, only, seen
from trainwarden.record import Event
from trainwarden.rules.core.inputs import Command, Happened, Tick

ATTEMPT = Attempt(changes=[dirty(351, 400)], end="signal")
LAST_SEQ = 372 + 7 + 1  # steps, checkpoints, start


def decided(**settings: Any) -> Played:
    """The core with a decision that no poll has let out yet."""
    played = acting(**settings)
    played.play(ATTEMPT, upto=372)
    return played


NOW = ATTEMPT.time(372) + 1


@pytest.mark.parametrize(
    ("changed", "gate"),
    [
        ({"authenticated": False}, "unauthenticated"),
        ({"may_act": False}, "not_allowed"),
        ({"caught_up": False}, "catching_up"),
        ({"reachable": False}, "catching_up"),
        ({"last_seq": LAST_SEQ + 5}, "catching_up"),
        ({"time": NOW + 3600}, "stale"),
    ],
)
def test_a_source_that_does_not_satisfy_holds_the_action_and_the_gate_is_named(
    changed: dict[str, Any], gate: str
) -> None:
    played = decided()
    values = {"time": NOW, "last_seq": LAST_SEQ, **changed}
    played.take(seen(ATTEMPT, values.pop("time"), values.pop("last_seq"), **values))
    assert only(played.incidents)["held_by"] == gate
    assert played.rollbacks == []


def test_the_gates_open_and_the_action_leaves_once() -> None:
    played = decided()
    for _ in range(3):
        played.take(seen(ATTEMPT, NOW, LAST_SEQ))
        played.take(Tick(NOW))
    assert len(played.rollbacks) == 1
    assert only(played.incidents)["held_by"] is None


def test_slow_records_may_be_older() -> None:
    played = acting()
    slow = Attempt(changes=[dirty(351, 400)], end="signal")
    slow.time = lambda step: BEGIN + 100.0 * step  # type: ignore[method-assign]
    played.play(slow, upto=372)
    played.take(seen(slow, slow.time(372) + 250, LAST_SEQ))
    assert len(played.rollbacks) == 1


def test_without_a_receiver_nothing_is_delivered() -> None:
    played = acting(receiver=False)
    played.play(ATTEMPT, live=True, upto=372)
    assert only(played.incidents)["held_by"] == "no_receiver"
    assert played.sent() == []


def test_an_attempt_that_has_ended_is_not_acted_upon() -> None:
    played = decided()
    played.take(Happened(ATTEMPT.who, 0, Event(kind="exit", time=NOW, fields={"reason": "signal"})))
    played.take(seen(ATTEMPT, NOW, LAST_SEQ))
    assert only(played.incidents)["held_by"] == "start_ended"


def command(name: Any, played: Played, **values: Any) -> Command:
    incident = only(played.incidents)
    return Command(name, "ann", NOW, **{"incident": incident["id"], **values})


def test_in_approval_mode_the_action_waits_for_the_plan_that_was_shown() -> None:
    played = acting(mode="approve")
    played.play(ATTEMPT, live=True, upto=372)
    incident = only(played.incidents)
    assert (incident["state"], incident["held_by"]) == ("awaiting_approval", "approval")
    played.take(command("approve", played, plan_id="plan_of_yesterday"))
    assert played.rollbacks == []
    assert "look again" in only(played.incidents)["timeline"][-1]["says"]
    played.take(command("approve", played, plan_id=incident["plan"]["plan_id"]))
    assert len(played.rollbacks) == 1
    assert only(played.incidents)["approved_by"] == "ann"


def test_an_approval_does_not_open_the_other_gates() -> None:
    played = acting(mode="approve")
    played.play(ATTEMPT, upto=372)
    incident = only(played.incidents)
    played.take(command("approve", played, plan_id=incident["plan"]["plan_id"]))
    assert (played.rollbacks, only(played.incidents)["held_by"]) == ([], "not_live")


def test_a_dismissed_incident_is_over() -> None:
    played = decided()
    played.take(command("dismiss", played, comment="known"))
    played.take(seen(ATTEMPT, NOW, LAST_SEQ))
    assert only(played.incidents)["state"] == "dismissed"
    assert played.rollbacks == []


def test_an_acknowledgement_is_written_down_and_changes_nothing_else() -> None:
    played = decided()
    before = only(played.incidents)["state"]
    played.take(command("acknowledge", played))
    assert only(played.incidents)["acknowledged_by"] == "ann"
    assert only(played.incidents)["state"] == before


@pytest.mark.parametrize(("until", "sent"), [(NOW + 60, 0), (None, 0), (NOW - 60, 1)])
def test_a_silence_holds_action_and_notification_while_it_lasts(until: float | None, sent: int) -> None:
    played = acting()
    played.take(Command("silence", "ann", BEGIN, matchers={"run": "demo"}, until=until))
    played.play(ATTEMPT, upto=372)
    played.take(seen(ATTEMPT, NOW, LAST_SEQ))
    assert len(played.rollbacks) == sent
    if not sent:
        assert only(played.incidents)["held_by"] == "silenced"
        assert played.sent("notify") == []


def test_a_silence_of_another_run_holds_nothing_and_one_that_ended_early_is_lifted() -> None:
    played = acting()
    played.take(Command("silence", "ann", BEGIN, matchers={"run": "other"}, until=None))
    played.take(Command("silence", "ann", BEGIN, matchers={"run": "demo"}, until=None))
    played.take(Command("silence", "ann", BEGIN, matchers={"run": "demo"}, until=BEGIN))
    played.play(ATTEMPT, live=True, upto=372)
    assert len(played.rollbacks) == 1


def test_a_request_that_no_restart_follows_is_handed_over() -> None:
    played = decided()
    played.take(seen(ATTEMPT, NOW, LAST_SEQ))
    played.take(Tick(NOW + 1000))
    assert only(played.incidents)["state"] == "acting"
    played.take(Tick(NOW + 3000))
    assert only(played.incidents)["state"] == "escalated"


def test_a_signal_that_never_varies_or_stops_varying_is_noticed_once() -> None:
    def stuck(step: int, signals: dict[str, Any]) -> None:
        signals["grad_norm"] = {"all": 0.0}
        if step > 300:
            signals["loss"] = 2.125

    played = core()
    played.play(Attempt(changes=[stuck], last=500))
    kinds = [(notice["kind"], notice["signal"]) for notice in played.notices]
    assert kinds == [("dead_signal", "grad_norm"), ("repeated_signal", "loss")]
    assert played.incidents == []
