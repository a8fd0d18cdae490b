"""Plans audited: every field says why, the margin is the optimizer's own, checkpoints that are too rare are said to be, a skip is widened."""

from __future__ import annotations

import dataclasses
from typing import Any

import msgspec
import pytest

from tests.rules.core.made_up_facts import facts
from tests.rules.core.runs import (
    BATCH,
    BEGIN,
    Attempt,
    Played,
    acting,
    dirty,
    only,
    plan_in,
    shifted,
    substituted,
    under,
)
from tests.rules.core.test_targets_and_suspects import CHECKPOINTS, checkpoint
from trainwarden.plan import Plan, Target
from trainwarden.record import Ranges, Step
from trainwarden.rules.core.inputs import Start
from trainwarden.rules.core.planning import Planned, Refusal, plan_rollback, widened
from trainwarden.rules.core.recovery import begin, observe
from trainwarden.rules.core.settings import Settings
from trainwarden.rules.core.spacing import Going, advice, interval, none_at_all
from trainwarden.rules.core.state import Alive, Checkpoint, Executed, Incident
from trainwarden.rules.core.stream import Line
from trainwarden.rules.core.targets import choose, usable, why_not


def alive_of(made: Any, **values: Any) -> Alive:
    return Alive(
        start=Start("uid", "demo", 0, "s"),
        line=Line(),
        trace=made.trace,
        can_skip=["substitute"],
        first_step=1,
        **values,
    )


def planned(cause: str, beta2: float = 0.98, found: list[Checkpoint] = CHECKPOINTS, **values: Any) -> Planned | Refusal:
    made = facts(dirty(301, 350))
    made = dataclasses.replace(made, beta2=beta2)
    return plan_rollback(made, cause, alive_of(made), found, [], Settings(), **values)


@pytest.mark.parametrize(
    ("cause", "beta2"),
    [
        ("data", 0.98),
        ("numeric", 0.98),
        ("numeric", 0.9999),
        ("optimizer_state", 0.98),
        ("learning_rate", 0.98),
        ("hardware", 0.98),
        ("undetermined", 0.98),
    ],
)
def test_every_field_that_is_not_at_its_default_says_why(cause: str, beta2: float) -> None:
    found = planned(cause, beta2)
    assert isinstance(found, Planned)
    plain = msgspec.to_builtins(Plan(plan_id="", run_uid="", for_attempt=0))
    told = msgspec.to_builtins(found.plan)
    own = ("plan_id", "run_uid", "for_attempt", "checks", "reasons", "action")
    changed = {name for name, value in told.items() if name not in own and value != plain[name]}
    assert changed <= set(found.plan.reasons), changed - set(found.plan.reasons)
    assert all(one.endswith(".") and len(one) > 10 for one in found.plan.reasons.values())


def test_the_margin_is_that_of_the_actual_beta2_and_unknown_is_said_to_be() -> None:
    near, far = planned("optimizer_state", 0.98), planned("optimizer_state", 0.99)
    assert isinstance(near, Planned)
    assert isinstance(far, Planned)
    assert near.plan.target is not None
    assert far.plan.target is not None
    assert (near.plan.target.step, far.plan.target.step) == (200, 150)
    assert "(50 steps at beta2 0.98)" in near.plan.reasons["target"]
    unknown = choose(CHECKPOINTS, [], 301, 1, "numeric", None)
    assert unknown is not None
    assert (unknown.target.step, unknown.too_young, unknown.memory) == (250, False, None)
    assert "beta2 is not known" in unknown.says


def test_a_reset_for_want_of_an_older_checkpoint_says_so_and_needs_a_person() -> None:
    found = planned("numeric", 0.9999)
    assert isinstance(found, Planned)
    assert found.low_confidence
    assert found.plan.reset_optimizer
    assert "within one memory of the onset (10000 steps)" in found.plan.reasons["reset_optimizer"]
    assert "keep 202 checkpoints" in found.advice[0]


def going(onset: int = 1351, now: int = 1380) -> Going:
    return Going(onset=onset, uncertainty=1, now=now, stride=1, seconds=30.0)


def advised(every: int, now: int = 1380, cause: str = "data", beta2: float | None = None) -> list[str]:
    known = [checkpoint(step) for step in range(every, 1351, every)]
    chosen = choose(known, [], 1351, 1, cause, beta2)
    assert chosen is not None
    return advice(chosen, known, going(now=now))


def test_checkpoints_that_are_close_enough_are_not_worth_a_word() -> None:
    assert advised(25) == []
    assert advised(200, now=1700) == []  # what cannot be helped is more than a closer one would save


def test_checkpoints_that_double_the_cost_are_too_rare_and_the_cost_is_told_in_steps_and_hours() -> None:
    (says,) = advised(500)
    assert "which come every 500 steps" in says
    assert "going back makes 380 steps again (3.2 h)" in says
    assert "349 of them only because none lies closer before step 1350" in says
    assert "One every 30 steps" in says


def test_the_margin_counts_as_what_cannot_be_helped() -> None:
    assert advised(500, cause="optimizer_state", beta2=0.998) == []
    (says,) = advised(400, cause="optimizer_state", beta2=0.995)
    assert "before step 1150" in says


def test_the_usual_distance_is_that_within_attempts() -> None:
    assert interval([checkpoint(100)]) is None
    assert interval([checkpoint(100), checkpoint(200), checkpoint(300), checkpoint(210, attempt=1)]) == 100


@pytest.mark.parametrize(
    ("known", "says"),
    [
        ([], "No complete checkpoint was ever reported"),
        ([checkpoint(500)], "The first checkpoint is of step 500"),
        ([checkpoint(100, deleted=True), checkpoint(200, deleted=True)], "They come every 100 steps"),
    ],
)
def test_where_there_is_nothing_to_go_back_to_it_says_what_would_have_helped(
    known: list[Checkpoint], says: str
) -> None:
    assert says in none_at_all(known, 301)
    found = planned("data", found=known)
    assert isinstance(found, Refusal)
    assert says in found.advice


def test_a_skip_that_did_not_suffice_reaches_further_on_both_sides() -> None:
    made = facts(dirty(301, 350))
    assert widened([(4800, 5600)], made) == [(4400, 6000)]
    assert widened([(0, 16)], made) == [(0, 24)]
    earlier = Plan(plan_id="p", run_uid="u", for_attempt=0, skip_samples=[(4000, 4160)])
    found = planned("data", earlier=earlier, further_than=250)
    assert isinstance(found, Planned)
    assert found.plan.skip_samples == [(3920, 4240), (4800, 5600)]
    assert "widened by 50%" in found.plan.reasons["skip_samples"]


def test_of_a_probe_that_has_not_passed_nothing_is_a_target() -> None:
    executed = [Executed("p", 1, 200, probe=True)]
    both = [checkpoint(200), checkpoint(250), checkpoint(250, attempt=1)]
    assert [(one.attempt, one.step) for one in usable(both, executed, 300)] == [(0, 200)]
    assert why_not(both[2], executed) == "is of a probe that has not passed"
    passed = [Executed("p", 1, 200)]
    assert [(one.attempt, one.step) for one in usable(both, passed, 300)] == [(1, 250), (0, 200)]
    behind = [*executed, Executed("q", 2, 200)]
    assert why_not(checkpoint(250, attempt=2), behind) is None


# In whole runs.


def broken(**settings: Any) -> Played:
    played = acting(**settings)
    played.play(Attempt(changes=[dirty(351, 400)], end="signal"), live=True, upto=375)
    return played


def says(incident: dict[str, Any]) -> str:
    return "\n".join(line["says"] for line in incident["timeline"])


def test_what_a_rollback_may_need_is_kept_from_the_opening_on() -> None:
    played = acting()
    attempt = Attempt(changes=[dirty(351, 400)], start={"beta2": 0.98, "betas": [0.9, 0.98]}, checkpoint_every=25)
    played.play(attempt, live=True, upto=375)
    pins = played.sent(of_type="training.checkpoint.pin.requested")
    steps = [one.body["data"]["plan"]["target"]["step"] for one in pins]
    assert steps == [325, 275]  # the newest before the onset, and the newest older by fifty steps
    assert plan_in(only(played.incidents)).target is not None
    assert len({one.key for one in pins}) == len(pins)


def test_an_attempt_that_began_from_a_fallback_is_verified_by_what_must_hold_there() -> None:
    played = broken()
    plan = plan_in(only(played.incidents))
    fallback = plan.fallback_targets[0]
    assert fallback.step == 250
    start = under(plan, target=msgspec.to_builtins(fallback), start_step=251, not_applied={"target": "it is gone"})
    start["resumed_from"] = msgspec.to_builtins(fallback)
    played.play(Attempt(number=1, first=251, changes=[substituted(plan)], start=start, began=BEGIN + 10_000), live=True)
    incident = only(played.incidents)
    assert (incident["state"], incident["verdict"]) != ("escalated", "mismatch"), says(incident)
    assert incident["state"] == "recovered", says(incident)
    assert all(check["ok"] for check in incident["verification"]["checks"].values())
    assert set(incident["verification"]["checks"]) == {"start_step", "lr", "optimizer_step", "skipped"}
    assert "could not be loaded" in says(incident)
    assert plan_in(incident).target == fallback


def test_a_target_that_no_plan_names_is_a_mismatch_as_ever() -> None:
    played = broken()
    plan = plan_in(only(played.incidents))
    other = msgspec.to_builtins(Target(attempt=0, step=50, path="ckpt/0/50"))
    start = under(plan, target=other, start_step=51, not_applied={"target": "it is gone"})
    played.play(Attempt(number=1, first=51, start=start, began=BEGIN + 10_000), live=True, upto=60)
    assert only(played.incidents)["verdict"] == "mismatch"


def test_steps_whose_samples_are_replaced_do_not_say_that_the_state_was_not_restored() -> None:
    made = facts(dirty(351, 400), onset=351, last=375)
    incident = Incident("i", "uid", "demo", 0, "s", onset=351, opened_step=352, opened_time=0.0, trend=made.trend)

    def window(skip: Ranges) -> str:
        plan = Plan(
            plan_id="p", run_uid="uid", for_attempt=1, target=Target(attempt=0, step=320, path="c"), skip_samples=skip
        )
        verification = begin(incident, plan, 1, "t", 321, made.trace)
        other = Attempt(
            number=1, first=321, last=351, changes=[shifted(331, 0.5), substituted(plan)], checkpoint_every=0
        )
        found = []
        for line in other.lines():
            if isinstance(line, Step):
                found += observe(verification, line, made.trace, incident.trend, Settings())
        return next((str(one.outcome) for one in found if one.outcome), "none")

    assert window([(330 * BATCH, 400 * BATCH)]) == "none"
    assert window([(350 * BATCH, 400 * BATCH)]) == "mismatch"  # steps that read what their parent read


def test_what_does_not_recover_goes_further_back_and_leaves_more_out() -> None:
    played = broken()
    plan = plan_in(only(played.incidents))
    stays = shifted(401, 0.25)
    changes = [substituted(plan), stays]
    played.play(
        Attempt(number=1, first=301, changes=changes, start=under(plan), began=BEGIN + 10_000, last=620, end=None),
        live=True,
    )
    second = plan_in(played.incidents[1])
    assert second.target is not None
    assert plan.target is not None
    assert second.target.step < plan.target.step
    (was,), (now,) = plan.skip_samples, second.skip_samples
    assert now[0] < was[0] < was[1] < now[1]
    assert "widened" in second.reasons["skip_samples"]
