"""What holds for every run, whatever happens in it: nothing is done that may not be, and everybody who must know is told."""

from __future__ import annotations

import math
from typing import Any

import pytest
from hypothesis import HealthCheck, given
from hypothesis import settings as how
from hypothesis import strategies as st

from tests.rules.core.runs import (
    Attempt,
    Change,
    Played,
    acting,
    core,
    dirty,
    gradients,
    not_a_number,
    only,
    seen,
    shifted,
    small_pack,
    spike,
)
from trainwarden.rules.core.effects import Save
from trainwarden.rules.core.feed import dump, load
from trainwarden.rules.core.gates import DAY
from trainwarden.rules.core.inputs import Command, Receipt, Tick
from trainwarden.rules.core.settings import Settings

STEPS = st.integers(60, 330)
CHANGES: st.SearchStrategy[Change] = st.one_of(
    st.builds(lambda step, length: dirty(step, step + length), STEPS, st.integers(1, 80)),
    st.builds(lambda step, height: spike({step: height}), STEPS, st.floats(0.1, 10.0)),
    st.builds(not_a_number, STEPS),
    st.builds(shifted, STEPS, st.floats(-1.0, 3.0)),
    st.builds(lambda step, norm: gradients({step: norm}), STEPS, st.floats(0.0, 1e6)),
)
RUNS = st.lists(CHANGES, min_size=1, max_size=3)
SOME = how(max_examples=8, deadline=None, suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large])
WEBHOOKS = ("rollback", "stop", "probe", "learning_rate.lower")
LAST = 420


def acted(played: Played) -> list[str]:
    """The types of what was asked of the run; to keep a checkpoint does nothing to it."""
    kinds = [str(one.body["type"]) for one in played.sent()]
    return [kind for kind in kinds if any(f"training.{name}.requested" == kind for name in WEBHOOKS)]


def rows(played: Played) -> list[dict[str, Any]]:
    """Every row that was ever saved of an incident."""
    return [one.row for one in played.effects if isinstance(one, Save) and one.kind == "incident"]


@SOME
@given(RUNS, st.booleans(), st.booleans(), st.booleans())
def test_no_run_in_observe_mode_is_ever_acted_upon(
    changes: list[Change], soft: bool, receiver: bool, approved: bool
) -> None:
    played = core(mode="observe", receiver=receiver, lower_lr=soft, probe=soft, confidence=0.0)
    attempt = Attempt(changes=changes, last=LAST, end=None)
    played.play(attempt, live=True)
    if approved:
        for row in played.incidents:
            plan = (row["plan"] or {}).get("plan_id")
            played.take(Command("approve", "ann", attempt.time(LAST) + 1, row["id"], plan))
    played.take(Tick(attempt.time(LAST) + 2))
    assert acted(played) == []
    assert all(row["held_by"] is not None for row in played.incidents if row["action"] not in ("none", "escalate"))


@SOME
@given(RUNS, st.sampled_from(["observe", "approve", "act"]), st.booleans())
def test_every_action_but_the_soft_ones_makes_the_incident_critical(
    changes: list[Change], mode: str, soft: bool
) -> None:
    played = core(mode=mode, receiver=True, lower_lr=soft, probe=soft)
    played.play(Attempt(changes=changes, last=LAST, end=None), live=True)
    for row in rows(played):
        if row["action"] not in ("none", "lower_lr", "probe"):
            assert row["severity"] == "critical"
        if row["plan"] is not None:
            assert row["plan"]["action"] == row["action"]
            assert {"mode", "approval", "run_limit", "stale"} <= {one["gate"] for one in row["gates"]}
        if row["action"] in ("rollback", "stop") and row["done"] is None and row["state"] in ("confirmed",):
            shut = [one["gate"] for one in row["gates"] if one["answer"] != "allow"]
            assert row["held_by"] == (shut[0] if shut else None)


def first_decision(played: Played) -> list[tuple[Any, ...]]:
    """The first row of each incident in which something was decided."""
    found: dict[str, tuple[Any, ...]] = {}
    for row in rows(played):
        if row["action"] != "none":
            found.setdefault(
                row["id"], (row["action"], row["plan"], row["onset_step"], row["confirmed_step"], row["cause"]["name"])
            )
    return list(found.values())


@SOME
@given(RUNS, st.integers(2, 60))
def test_a_replay_decides_first_what_the_live_run_decides_first(changes: list[Change], chunk: int) -> None:
    attempt = Attempt(changes=changes, last=LAST, end=None)
    live, replayed = acting(), acting()
    live.play(attempt, live=True)
    replayed.play(attempt, chunk=chunk)
    assert first_decision(live)[:1] == first_decision(replayed)[:1]


@SOME
@given(RUNS)
def test_no_attempt_is_ended_twice_and_no_run_is_touched_in_its_warm_up(changes: list[Change]) -> None:
    played = acting(confidence=0.0, warmup_steps=200)
    played.play(Attempt(changes=changes, last=LAST, end=None), live=True)
    assert len({one.key for one in played.sent() if one.body["type"] in acted(played)}) <= 1
    assert all(row["confirmed_step"] > 0 for row in rows(played) if row["action"] != "none")
    first = next((row for row in rows(played) if row["action"] != "none"), None)
    assert first is None or first["timeline"][-1]["step"] is None or first["timeline"][-1]["step"] > 200


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_what_heals_by_itself_is_left_alone_also_where_soft_actions_are_allowed(seed: int) -> None:
    """Case A01: a gradient that surges, a loss that is back within thirty steps."""
    norms = dict(zip(range(327, 332), (3.0, 7.0, 50.0, 450.0, 3000.0), strict=True))
    changes = [gradients(norms), spike({330: 3.0}, heals=331, until=361)]
    played = acting(lower_lr=True, probe=True, confidence=0.0)
    played.play(Attempt(seed=seed, changes=changes, last=LAST + 60, end=None), live=True)
    assert acted(played) == []
    assert {row["action"] for row in rows(played)} == {"none"}


DIRTY = Attempt(changes=[dirty(351, 400)], end=None)
SEQ = 372 + 7 + 1
NOW = DIRTY.time(372) + 1


def decided(**settings: Any) -> Played:
    played = acting(**settings)
    played.play(DIRTY, upto=372)
    return played


def test_an_approval_fails_if_the_plan_has_changed_since_it_was_shown() -> None:
    played = decided(mode="approve")
    played.take(seen(DIRTY, NOW, SEQ))
    shown = only(played.incidents)
    incident = next(iter(played.state.memory.runs["uid"].incidents.values()))
    for checkpoint in played.state.memory.runs["uid"].checkpoints:
        if checkpoint.path == shown["plan"]["target"]["path"]:
            checkpoint.deleted = True  # rotation has taken it
    played.play(DIRTY, upto=376)
    again = only(played.incidents)
    assert again["plan"]["plan_id"] != shown["plan"]["plan_id"]
    played.take(Command("approve", "ann", NOW + 5, incident.id, shown["plan"]["plan_id"]))
    played.take(seen(DIRTY, NOW + 5, SEQ))
    assert played.rollbacks == []
    assert "look again" in only(played.incidents)["timeline"][-1]["says"]


@pytest.mark.parametrize("status", ["expired", "refused", "failed", "undeliverable"])
def test_a_request_that_came_to_nothing_pages_a_person(status: Any) -> None:
    played = decided()
    played.take(seen(DIRTY, NOW, SEQ))
    before = len(played.sent("notify"))
    played.take(Receipt(only(played.rollbacks).key, status, NOW + 900))
    row = only(played.incidents)
    assert (row["state"], row["severity"], row["done"]) == ("escalated", "critical", status)
    assert len(played.sent("notify")) == before + 1


def test_a_decision_that_waited_too_long_pages_a_person_and_is_not_done_any_more() -> None:
    played = decided(mode="approve", decision_ttl=3600.0)
    played.take(seen(DIRTY, NOW, SEQ))
    row = only(played.incidents)
    before = len(played.sent("notify"))
    played.take(Tick(NOW + 3500))
    assert only(played.incidents)["state"] == "awaiting_approval"
    played.take(Tick(NOW + 3700))
    late = only(played.incidents)
    assert (late["state"], late["severity"]) == ("escalated", "critical")
    assert "held by approval" in late["timeline"][-1]["says"]
    assert len(played.sent("notify")) == before + 1
    played.take(Command("approve", "ann", NOW + 3800, row["id"], row["plan"]["plan_id"]))
    assert played.rollbacks == []


def test_what_is_only_said_does_not_expire() -> None:
    played = decided(mode="observe", decision_ttl=3600.0)
    played.take(seen(DIRTY, NOW, SEQ))
    played.take(Tick(NOW + 7200))
    assert only(played.incidents)["state"] == "confirmed"


def test_an_acknowledged_incident_waits_for_its_persons_approval() -> None:
    played = decided()
    row = only(played.incidents)
    played.take(Command("acknowledge", "ann", NOW, row["id"]))
    played.take(seen(DIRTY, NOW, SEQ))
    assert (played.rollbacks, only(played.incidents)["held_by"]) == ([], "acknowledged")
    played.take(Command("approve", "ann", NOW, row["id"], row["plan"]["plan_id"]))
    assert len(played.rollbacks) == 1


def test_a_maintenance_window_holds_what_is_decided_until_its_end_and_people_are_still_told() -> None:
    played = acting()
    played.take(Command("maintenance", "configuration", DIRTY.began, matchers={"run": "de*"}, until=NOW + 100))
    played.play(DIRTY, live=True, upto=372)
    row = only(played.incidents)
    assert row["held_by"] == "maintenance"
    assert next(one["until"] for one in row["gates"] if one["gate"] == "maintenance") == NOW + 100
    assert played.sent("notify")
    played.take(seen(DIRTY, NOW, SEQ))
    assert played.rollbacks == []
    played.take(Command("maintenance", "configuration", NOW))  # the daemon begins anew, without that window
    played.take(seen(DIRTY, NOW, SEQ))
    assert len(played.rollbacks) == 1


def another(number: int, settings: Settings, before: Played) -> Played:
    """A further run in the same daemon, after a restart of it."""
    state = load(dump(before.state), settings, small_pack())
    played = Played(state)
    run = Attempt(run_uid=f"uid{number}", run="demo", changes=[dirty(351, 400)], end=None, began=NOW + 1000.0 * number)
    played.play(run, upto=372)
    played.take(seen(run, run.time(372) + 1, SEQ))
    return played


def test_the_limit_of_all_runs_holds_across_restarts_and_opens_after_a_day() -> None:
    settings = Settings(mode="act", receiver=True, max_actions_per_day=2)
    played = decided(max_actions_per_day=2)
    played.take(seen(DIRTY, NOW, SEQ))
    assert len(played.rollbacks) == 1
    second = another(1, settings, played)
    assert len(second.rollbacks) == 1
    third = another(2, settings, second)
    assert third.rollbacks == []
    held = next(row for row in third.incidents if row["run_uid"] == "uid2")
    assert (held["held_by"], held["severity"]) == ("fleet_limit", "critical")
    until = next(one["until"] for one in held["gates"] if one["gate"] == "fleet_limit")
    assert until == pytest.approx(NOW + DAY)


def test_a_refused_request_does_not_count_for_the_day() -> None:
    played = decided(max_actions_per_day=1)
    played.take(seen(DIRTY, NOW, SEQ))
    played.take(Receipt(only(played.rollbacks).key, "refused", NOW + 1, reason="stale"))
    again = another(1, Settings(mode="act", receiver=True, max_actions_per_day=1), played)
    assert len(again.rollbacks) == 1


def test_the_limit_of_a_runs_day_holds_across_restarts() -> None:
    settings = Settings(mode="act", receiver=True, max_rollbacks_per_day=1, max_rollbacks=5)
    played = decided(max_rollbacks_per_day=1, max_rollbacks=5)
    played.take(seen(DIRTY, NOW, SEQ))
    plan = only(played.rollbacks).body["data"]["plan"]
    after = Played(load(dump(played.state), settings, small_pack()))
    second = Attempt(
        number=1,
        first=plan["target"]["step"] + 1,
        last=700,
        changes=[not_a_number(500)],
        start={"resumed_from": plan["target"], "plan_applied": {"plan_id": plan["plan_id"], "start_step": 351}},
        began=NOW + 100,
        end=None,
    )
    after.play(second, live=True, upto=600)
    held = [row for row in after.incidents if row["attempt"] == 1 and row["action"] == "rollback"]
    assert [row["held_by"] for row in held] == ["day_limit"]
    assert after.rollbacks == []
    assert math.isfinite(next(one["until"] for one in held[0]["gates"] if one["gate"] == "day_limit"))
