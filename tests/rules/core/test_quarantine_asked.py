"""A copy of the damaged state is asked for at confirmation, once, where an operator said so; a rollback waits for it, and never goes back to it."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from tests.rules.core.runs import Attempt, Played, acting, core, dirty, only, plan_in, seen
from trainwarden.record import Event, Step
from trainwarden.rules.core.inputs import Happened, Receipt, Steps, Tick
from trainwarden.webhook import decode_envelope, request_id

BROKEN = Attempt(changes=[dirty(351, 400)], end="signal")
ASKED = "training.checkpoint.quarantine.requested"


def broken(upto: int = 375, played: Played | None = None, **settings: Any) -> Played:
    played = played or acting(**{"quarantine": True, **settings})
    played.play(BROKEN, live=True, upto=upto)
    return played


def told(played: Played, **fields: Any) -> None:
    """Let the trainer report a copy."""
    incident = only(played.incidents)
    event = Event(
        kind="checkpoint",
        time=BROKEN.time(375),
        seq=5000,
        step=375,
        fields={"path": "/run/quarantine/x/checkpoint", "quarantined": True, "incident": incident["id"], **fields},
    )
    played.take(Happened(BROKEN.who, 0, event))


def test_it_is_asked_once_at_confirmation_with_what_is_needed_to_go_back_to_the_step() -> None:
    played = broken()
    sent = only(played.sent(of_type=ASKED))
    envelope = decode_envelope(msgspec.json.encode(sent.body))
    plan, incident = envelope.data.plan, only(played.incidents)
    assert plan.action == "quarantine"
    assert plan.target is None
    assert plan.for_attempt == incident["attempt"] == 0
    assert plan.quarantine is not None
    assert plan.quarantine.incident == incident["id"]
    assert plan.quarantine.suspect_step == incident["onset_step"] == 351
    assert plan.quarantine.last_good is not None
    assert plan.quarantine.last_good.step == 300
    assert plan.quarantine.expires_at == envelope.data.expires_at
    assert sent.key == request_id(envelope.data.run_uid, 0, "quarantine", 0)
    confirmed = next(place for place, one in enumerate(played.effects) if one is sent)
    assert confirmed > next(
        place for place, one in enumerate(played.effects) if getattr(one, "body", {}).get("event") == "opened"
    )


@pytest.mark.parametrize("settings", [{"quarantine": False}, {"receiver": False}])
def test_it_is_not_asked_where_nobody_said_so_or_nobody_could_be_told(settings: dict[str, Any]) -> None:
    assert broken(**settings).sent(of_type=ASKED) == []


def test_it_is_asked_of_a_run_that_is_only_observed() -> None:
    assert broken(mode="observe").sent(of_type=ASKED)


def test_it_is_not_asked_of_a_source_that_may_not_act() -> None:
    played = acting(quarantine=True)
    played.take(seen(BROKEN, BROKEN.time(1), 0))
    lines = list(BROKEN.lines())
    for line in lines[:380]:
        if isinstance(line, Step):
            played.take(Steps(BROKEN.who, 0, (line,)))
            played.take(seen(BROKEN, line.time, line.seq, authenticated=False))
        else:
            played.take(Happened(BROKEN.who, 0, line))
    assert only(played.incidents)["confirmed_step"] is not None
    assert played.sent(of_type=ASKED) == []


def test_a_decided_rollback_waits_for_the_copy_and_leaves_once_it_is_reported() -> None:
    played = broken()
    assert plan_in(only(played.incidents)).action == "rollback"
    assert only(played.incidents)["held_by"] == "evidence"
    assert played.rollbacks == []
    told(played)
    played.take(Tick(BROKEN.time(375)))
    assert only(played.rollbacks)


@pytest.mark.parametrize("end", ["failed", "refused", "late"])
def test_it_does_not_wait_for_a_copy_that_will_not_be(end: str) -> None:
    played = broken()
    confirmed = BROKEN.time(only(played.incidents)["confirmed_step"])
    played.take(Tick(confirmed + 59))
    assert played.rollbacks == []
    if end == "failed":
        told(played, complete=False, error="disk full")
    elif end == "refused":
        played.take(Receipt(only(played.sent(of_type=ASKED)).key, "refused", confirmed + 59, "stale", "no"))
    played.take(Tick(confirmed + (61 if end == "late" else 59)))
    assert only(played.rollbacks)
    assert only(played.incidents)["state"] == "acting"


def test_the_copy_is_no_target_even_where_an_event_says_that_it_is_complete() -> None:
    played = acting(quarantine=True)
    numbers = iter(range(1, 10_000))
    fields = {"path": "/run/quarantine/x/checkpoint", "complete": True, "finite": True}
    for line in BROKEN.lines():
        line.seq = next(numbers)
        if isinstance(line, Event):
            played.take(Happened(BROKEN.who, 0, line))
            continue
        if line.step > 375:
            break
        played.take(Steps(BROKEN.who, 0, (line,)))
        if line.step == 340:
            for more in ({"quarantined": True}, {}):
                event = Event(kind="checkpoint", time=line.time, seq=next(numbers), step=340, fields={**fields, **more})
                played.take(Happened(BROKEN.who, 0, event))
    target = plan_in(only(played.incidents)).target
    assert target is not None
    assert target.step == 300
    assert all(one.step != 340 for one in plan_in(only(played.incidents)).fallback_targets)


def test_a_replay_asks_nobody_for_anything_else_than_the_live_run() -> None:
    live, replayed = broken(), core(quarantine=True, receiver=True, mode="act")
    replayed.play(BROKEN, upto=375)
    assert only(replayed.incidents)["plan"] == only(live.incidents)["plan"]
    keys = [one.key for one in live.sent(of_type=ASKED)]
    assert keys == [one.key for one in replayed.sent(of_type=ASKED)]
