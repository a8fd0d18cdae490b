"""The whole loop on recorded streams: a run breaks, is rolled back once, and recovers; or does not."""

from __future__ import annotations

import math
from datetime import UTC, datetime
from typing import Any

import msgspec
import pytest

from tests.cases.registry import case
from tests.rules.core.runs import (
    BATCH,
    BEGIN,
    Attempt,
    Change,
    Played,
    acting,
    core,
    default_pack,
    dirty,
    only,
    plan_in,
    shifted,
    small_pack,
    spike,
    substituted,
    under,
)
from trainwarden.plan import Plan, check_plan
from trainwarden.rules.core.inputs import Receipt
from trainwarden.webhook import Envelope, decode_envelope, request_id

BROKEN = Attempt(changes=[dirty(351, 400)], end="signal")
POISON = (350 * BATCH, 400 * BATCH)


def broken(upto: int = 375, **settings: Any) -> Played:
    played = acting(**settings)
    played.play(BROKEN, live=True, upto=upto)
    return played


def following(played: Played, number: int = 1, *changes: Change, **changed: Any) -> Attempt:
    plan = plan_in(played.incidents[-1])
    assert plan.target is not None
    values: dict[str, Any] = {
        "number": number,
        "first": plan.target.step + 1,
        "changes": [substituted(plan), *changes],
        "start": under(plan),
        "began": BEGIN + 10_000 * number,
    }
    return Attempt(**{**values, **changed})


def says(incident: dict[str, Any]) -> str:
    return "\n".join(line["says"] for line in incident["timeline"])


@pytest.mark.parametrize("pack", [small_pack, default_pack])
@pytest.mark.parametrize("seed", range(5))
def test_a_dirty_shard_is_rolled_back_once_skipped_whole_and_the_run_recovers(pack: Any, seed: int) -> None:
    played = acting(pack())
    played.play(Attempt(changes=[dirty(351, 400)], end="signal", seed=seed), live=True, upto=380)
    incident = only(played.incidents)
    plan = plan_in(incident)
    check_plan(plan)
    assert incident["state"] == "acting"
    assert abs(incident["onset_step"] - 351) <= 3
    assert incident["cause"]["name"] == "data"
    assert plan.skip_samples == [POISON]
    assert plan.target is not None
    assert plan.target.step == 300
    assert (plan.skip_mode, plan.reset_optimizer, plan.lr_factor) == ("substitute", False, 1.0)

    played.play(following(played, seed=seed), live=True)
    incident = only(played.incidents)
    assert (incident["state"], incident["done"], incident["held_by"]) == ("recovered", "executed", None), says(incident)
    assert all(check["ok"] for check in incident["verification"]["checks"].values())
    assert set(incident["verification"]["checks"]) == {"start_step", "lr", "optimizer_step", "skipped"}
    assert len(played.rollbacks) == 1


def test_the_request_is_an_envelope_that_the_receiver_reads_and_its_id_says_run_attempt_and_action() -> None:
    played = broken()
    sent = only(played.rollbacks)
    envelope = decode_envelope(msgspec.json.encode(sent.body))
    assert isinstance(envelope, Envelope)
    assert sent.key == request_id("uid", 0, "rollback", 0) == only(played.incidents)["webhook_id"]
    assert envelope.data.plan == plan_in(only(played.incidents))
    assert datetime.fromisoformat(envelope.data.expires_at) == datetime.fromtimestamp(sent.expires_at or 0, UTC)
    assert envelope.data.evidence
    rules = only(played.incidents)["rules"]
    assert [(one.alert, one.since, one.step) for one in envelope.data.alerts] == [
        (one["alert"], one["since"], one["step"]) for one in rules[: len(envelope.data.alerts)]
    ]
    assert envelope.data.alerts


def test_observing_decides_the_same_and_delivers_nothing() -> None:
    watched, acted = core(), broken()
    watched.play(BROKEN, live=True, upto=375)
    seen, done = only(watched.incidents), only(acted.incidents)
    assert (seen["action"], seen["held_by"], seen["state"]) == ("rollback", "mode", "confirmed")
    assert seen["plan"] == done["plan"]
    assert watched.sent() == []


def test_a_file_of_the_same_records_decides_the_same_plan_and_says_that_it_is_not_live() -> None:
    replayed = acting()
    replayed.play(BROKEN, upto=375)
    assert only(replayed.incidents)["plan"] == only(broken().incidents)["plan"]
    assert only(replayed.incidents)["held_by"] == "not_live"


def test_a_replay_of_both_attempts_ends_as_the_live_loop_did() -> None:
    live = broken()
    second = following(live)
    live.play(second, live=True)
    replayed = core()
    replayed.play(BROKEN, upto=375)
    replayed.play(second)
    for one in (
        "state",
        "onset_step",
        "opened_step",
        "confirmed_step",
        "closed_step",
        "verdict",
        "cause",
        "plan",
        "done",
    ):
        assert only(replayed.incidents)[one] == only(live.incidents)[one], one


def test_people_hear_of_the_opening_the_decision_and_the_end_once_each() -> None:
    played = broken()
    played.play(following(played), live=True)
    events = [sent.body["event"] for sent in played.sent("notify")]
    assert events == ["opened", "confirmed", "decided", "acting", "verifying", "ended"]
    assert len({sent.key for sent in played.sent("notify")}) == len(events)


def test_the_target_is_pinned_when_the_incident_opens() -> None:
    pin = broken().sent(of_type="training.checkpoint.pin.requested")[0]
    envelope = decode_envelope(msgspec.json.encode(pin.body))
    assert envelope.data.plan.target is not None
    assert envelope.data.plan.target.step == 300
    assert broken().effects.index(pin) < broken().effects.index(broken().rollbacks[0])


def test_a_second_daemon_that_started_late_sends_the_same_id_and_asks_for_no_second_rollback() -> None:
    first, second = broken(), acting()
    lines = list(BROKEN.lines())
    late = Attempt(changes=BROKEN.changes, end="signal")
    late.lines = lambda: iter([lines[0], *(line for line in lines[150:] if line.seq % 17)])  # type: ignore[method-assign]
    second.play(late, live=True, upto=380)
    assert only(second.rollbacks).key == only(first.rollbacks).key
    assert "gap" in {notice["kind"] for notice in second.notices}

    second.take(Receipt(only(second.rollbacks).key, "duplicate", BEGIN + 500))
    attempt = following(first)
    for played in (first, second):
        played.play(attempt, live=True)
        assert len(played.rollbacks) == 1
        assert only(played.incidents)["state"] == "recovered", says(only(played.incidents))


def test_a_plan_of_another_daemon_is_verified_all_the_same() -> None:
    played = broken()
    other = msgspec.structs.replace(plan_in(only(played.incidents)), plan_id="plan_of_another")
    played.play(following(played, start=under(other)), live=True)
    incident = only(played.incidents)
    assert incident["state"] == "recovered"
    assert incident["plan"]["plan_id"] == "plan_of_another"


def mischief(**values: float) -> Change:
    def change(step: int, signals: dict[str, Any]) -> None:
        for name, factor in values.items():
            if name in signals:
                signals[name] = {"all": signals[name]["all"] * factor} if name == "lr" else signals[name] * factor

    return change


@pytest.mark.parametrize(
    ("wrong", "word"),
    [
        ({"changes": [mischief(lr=1.3)]}, "learning rate"),
        ({"changes": [mischief(optimizer_step=0.5)]}, "counter"),
        ({"changes": [mischief(substituted_samples=0.0)]}, "substituted 0"),
        ({"changes": [shifted(1, 0.3)]}, "state was not restored"),
        ({"first": 321}, "first record"),
    ],
)
def test_records_that_contradict_the_plan_say_that_it_was_not_applied(wrong: dict[str, Any], word: str) -> None:
    played = broken()
    attempt = following(played, **{name: value for name, value in wrong.items() if name != "changes"})
    attempt.changes = [*attempt.changes, *wrong.get("changes", [])]
    played.play(attempt, live=True)
    incident = played.incidents[0]
    assert (incident["state"], incident["verdict"], incident["severity"]) == ("escalated", "mismatch", "critical")
    assert "Plan was not applied" in says(incident)
    assert word in says(incident)


def test_a_report_of_what_could_not_be_applied_is_a_mismatch_at_once() -> None:
    played = broken()
    start = under(plan_in(only(played.incidents)), not_applied={"skip_samples": "the loader cannot"})
    played.play(following(played, start=start), live=True, upto=301)
    assert only(played.incidents)["verdict"] == "mismatch"


def test_an_attempt_that_read_other_samples_before_the_onset_is_a_mismatch() -> None:
    played = broken()
    attempt = following(played)
    record = attempt.record

    def elsewhere(step: int, seq: int) -> Any:
        found = record(step, seq)
        found.samples = [(first + 3, end + 3) for first, end in found.samples] if step < 345 else found.samples
        return found

    attempt.record = elsewhere  # type: ignore[method-assign]
    played.play(attempt, live=True)
    assert only(played.incidents)["verdict"] == "mismatch"
    assert "other samples" in says(only(played.incidents))


@case("E07")
def test_a_rollback_that_does_not_help_is_followed_by_one_further_back_and_then_by_a_person() -> None:
    played = broken()
    stays = shifted(401, 0.25)
    played.play(following(played, 1, stays, end=None, last=620), live=True)
    first, second = played.incidents
    assert first["state"] == "not_recovered"
    assert second["follows"] == first["id"]
    assert plan_in(second).target.step < plan_in(first).target.step  # type: ignore[union-attr]
    (was,), (now,) = plan_in(first).skip_samples, plan_in(second).skip_samples
    assert now[0] < was[0] < was[1] < now[1]
    assert plan_in(second).reset_optimizer
    if second["held_by"] == "approval":
        pytest.fail("the cause is known and the rollback is not held")
    assert [sent.key for sent in played.rollbacks] == [request_id("uid", n, "rollback") for n in (0, 1)]

    plan = plan_in(second)

    def after_reset(step: int, signals: dict[str, Any]) -> None:
        first_step = plan.target.step + 1  # type: ignore[union-attr]
        if "optimizer_step" in signals:
            signals["optimizer_step"] = float(step - first_step + 1)
        signals["lr"] = {"all": signals["lr"]["all"] * min(1.0, (step - first_step + 1) / plan.rewarmup_steps)}

    played.play(following(played, 2, stays, after_reset, end=None, last=700), live=True)
    last = played.incidents[-1]
    assert played.incidents[1]["state"] == "not_recovered", says(played.incidents[1])
    assert (last["state"], last["action"], last["severity"]) == ("escalated", "escalate", "critical")
    assert len(played.rollbacks) == 2


def test_an_alert_before_the_skip_ends_means_not_recovered() -> None:
    played = broken()
    played.play(following(played, 1, dirty(360, 600)), live=True, upto=380)
    assert played.incidents[0]["state"] == "not_recovered"
    assert played.incidents[1]["follows"] == played.incidents[0]["id"]


@pytest.mark.parametrize(("last", "state"), [(505, "recovered"), (450, "inconclusive")])
def test_a_run_that_finishes_early_is_judged_with_half_of_the_last_window(last: int, state: str) -> None:
    played = broken()
    played.play(following(played, last=last), live=True)
    assert only(played.incidents)["state"] == state


def test_verification_goes_on_in_the_attempt_after_a_crash() -> None:
    played = broken()
    played.play(following(played, end="exception"), live=True, upto=460)
    source = {"attempt": 1, "step": 450, "path": "ckpt/1/450"}
    plan = plan_in(only(played.incidents))
    again = Attempt(number=2, first=451, changes=[substituted(plan)], start={"resumed_from": source}, began=BEGIN + 9e4)
    played.play(again, live=True)
    incident = only(played.incidents)
    assert (incident["state"], incident["attempt"]) == ("recovered", 0)
    assert incident["verification"]["attempt"] == 2
    assert len(played.rollbacks) == 1


def test_loading_a_checkpoint_of_the_abandoned_line_is_a_mismatch() -> None:
    played = broken(upto=352)
    for_attempt = Attempt(changes=BROKEN.changes, end="signal", checkpoint_every=25)
    played = acting()
    played.play(for_attempt, live=True, upto=380)
    played.play(following(played, end="exception"), live=True, upto=420)
    source = {"attempt": 0, "step": 375, "path": "ckpt/0/375"}
    played.play(Attempt(number=2, first=376, start={"resumed_from": source}, began=BEGIN + 9e4), live=True, upto=390)
    assert played.incidents[0]["verdict"] == "mismatch"
    assert "abandoned checkpoint" in says(played.incidents[0])


def test_a_crash_before_anything_was_asked_closes_the_incident_and_the_next_one_names_it() -> None:
    played = core()
    played.play(Attempt(changes=[dirty(351, 400)], end="exception"), upto=375)
    source = {"attempt": 0, "step": 300, "path": "ckpt/0/300"}
    again = Attempt(number=1, first=301, changes=[dirty(351, 400)], start={"resumed_from": source}, began=BEGIN + 9e4)
    played.play(again, upto=390)
    first, second = played.incidents
    assert first["state"] == "inconclusive"
    assert second["follows"] == first["id"]
    assert "broke at step 351 too" in str(second["evidence"])


def test_a_restart_without_the_requested_plan_is_a_mismatch() -> None:
    played = broken()
    source = {"attempt": 0, "step": 300, "path": "ckpt/0/300"}
    played.play(Attempt(number=1, first=301, start={"resumed_from": source}, began=BEGIN + 9e4), upto=305)
    assert (only(played.incidents)["state"], only(played.incidents)["verdict"]) == ("escalated", "mismatch")


def test_a_restart_in_place_leaves_the_requested_rollback_due() -> None:
    played = broken()
    source = {"attempt": 0, "step": 350, "path": "ckpt/0/350"}
    again = Attempt(
        number=0, start_id="in-place", first=351, start={"resumed_from": source}, began=BEGIN + 5e3, end="signal"
    )
    played.play(again, live=True, upto=360)
    assert played.incidents[0]["state"] == "acting"
    played.play(following(played, start=under(plan_in(played.incidents[0]))), live=True)
    assert played.incidents[0]["state"] == "recovered"
    assert len(played.rollbacks) == 1


@pytest.mark.parametrize("status", ["refused", "expired", "failed", "undeliverable"])
def test_a_request_that_comes_to_nothing_is_handed_to_a_person(status: Any) -> None:
    played = broken()
    played.take(Receipt(only(played.rollbacks).key, status, BEGIN + 500, "unreadable_target", "no such file"))
    incident = only(played.incidents)
    assert (incident["state"], incident["severity"], incident["done"]) == ("escalated", "critical", status)
    assert "unreadable_target: no such file" in says(incident)


def test_a_loader_that_can_not_skip_gets_no_rollback_but_a_person_with_the_reason() -> None:
    played = acting()
    played.play(Attempt(changes=[dirty(351, 400)], start={"can_skip": []}), live=True, upto=380)
    incident = only(played.incidents)
    assert (incident["state"], incident["action"], incident["plan"]) == ("escalated", "escalate", None)
    assert "can neither substitute nor shift" in says(incident)


def test_a_loader_that_can_only_shift_is_asked_to_shift() -> None:
    played = acting()
    played.play(Attempt(changes=[dirty(351, 400)], start={"can_skip": ["shift"]}), live=True, upto=380)
    assert plan_in(only(played.incidents)).skip_mode == "shift"


def test_without_a_checkpoint_before_the_onset_nothing_is_rolled_back() -> None:
    played = acting()
    played.play(Attempt(changes=[dirty(351, 400)], checkpoint_every=0), live=True, upto=380)
    assert only(played.incidents)["action"] == "escalate"
    assert "no complete checkpoint" in says(only(played.incidents))


def test_a_checkpoint_that_is_deleted_while_the_plan_waits_is_replaced() -> None:
    from trainwarden.record import Event
    from trainwarden.rules.core.inputs import Happened

    played = acting(mode="approve")
    attempt = Attempt(changes=[dirty(351, 400)])
    played.play(attempt, live=True, upto=365)
    before = plan_in(only(played.incidents))
    gone = Event(
        kind="checkpoint", time=BEGIN, seq=0, step=300, fields={"step": 300, "path": "ckpt/0/300", "deleted": True}
    )
    played.take(Happened(attempt.who, 0, gone))
    played.play(attempt, live=True, upto=370)
    after = plan_in(only(played.incidents))
    assert (before.target.step, after.target.step) == (300, 250)  # type: ignore[union-attr]
    assert before.plan_id != after.plan_id


def test_the_plan_of_a_poisoned_shard_that_begins_inside_a_step_covers_exactly_that_shard() -> None:
    def begins_inside(step: int, signals: dict[str, Any]) -> None:
        dirty(351, 401)(step, signals)

    attempt = Attempt(changes=[begins_inside], end="signal")
    record = attempt.record

    def off_the_grid(step: int, seq: int) -> Any:
        found = record(step, seq)
        spans = []
        for first, end in found.samples:
            for place in range((first + 5) // 800, (end - 1 + 5) // 800 + 1):
                spans.append(type(found.shards[0])(f"s{place}", max(0, place * 800 - 5), place * 800 + 795))
        found.shards = spans
        return found

    attempt.record = off_the_grid  # type: ignore[method-assign]
    played = acting()
    played.play(attempt, live=True, upto=380)
    assert plan_in(only(played.incidents)).skip_samples == [(5595, 6395)]


def test_a_healthy_run_has_no_incident() -> None:
    played = acting(default_pack())
    played.play(Attempt(last=1200), live=True, chunk=10)
    assert played.incidents == []
    assert played.sent() == played.sent("notify") == []


def test_nothing_is_done_within_the_warm_up() -> None:
    played = acting(warmup_steps=400)
    played.play(BROKEN, live=True, upto=390)
    assert played.rollbacks == []
    assert only(played.incidents)["held_by"] == "warm_up"


def test_a_run_that_was_just_rolled_back_is_left_alone_for_the_cool_down() -> None:
    played = broken(cooldown_steps=200, warmup_steps=0)
    played.play(following(played, 1, dirty(351, 600)), live=True, upto=430)
    assert played.incidents[1]["held_by"] == "cool_down"
    assert len(played.rollbacks) == 1


def test_no_rollback_is_made_where_none_is_allowed() -> None:
    played = acting(max_rollbacks=0)
    played.play(BROKEN, live=True, upto=390)
    assert only(played.incidents)["action"] == "escalate"
    assert played.rollbacks == []


def test_rows_hold_plain_data_without_nan() -> None:
    played = acting()
    played.play(Attempt(changes=[spike({400: math.nan, 401: math.nan})], last=480), live=True)

    def walk(value: Any) -> None:
        if isinstance(value, dict):
            for item in value.values():
                walk(item)
        elif isinstance(value, list):
            for item in value:
                walk(item)
        else:
            assert value is None or isinstance(value, str | bool | int) or math.isfinite(value)

    for row in played.incidents:
        walk(row)
    assert isinstance(Plan, type)
