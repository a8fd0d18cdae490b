"""One event is one incident, also after it was handed to a person: what goes on joins it, what is new or graver does not."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest

from tests.cases.build import Row, Verdicts, judge, rows
from tests.rules.core.runs import (
    BEGIN,
    Attempt,
    Change,
    Played,
    acting,
    default_pack,
    dirty,
    not_a_number,
    only,
    plan_in,
    seen,
    shifted,
    under,
)
from trainwarden.record import Step
from trainwarden.rules.core.feed import dump, load
from trainwarden.rules.core.inputs import Command, Steps, Tick


def run(*changes: Any, last: int = 110_000) -> Verdicts:
    """Case B08 without its schedule: a loss of 2.05 that lies 0.14 higher from step 108000 on; each change adds to it."""

    def make(step: int, chance: np.random.Generator) -> Row:
        loss = 2.05 + 0.14 * (step >= 108_000) + 0.02 * float(chance.normal())
        return {"loss": loss + sum(change(step) for change in changes), "lr": 3e-4}

    return judge(rows(106_000, last, make))


def high(first: int, end: int, by: float) -> Any:
    return lambda step: by if first <= step < end else 0.0


FOR_EVER = 10**9


def test_a_level_that_was_handed_over_takes_the_slower_rules_into_itself() -> None:
    found = run()
    (page,) = found.pages
    assert found.told == [page]
    assert (page["onset_step"], page["verdict"], page["state"]) == (108_000, "level_shift", "escalated")
    assert "TrainingLossLevelShift" in page["alerts"]


def test_a_rule_that_looks_at_the_whole_life_says_nothing_new_of_an_old_level() -> None:
    def make(step: int, chance: np.random.Generator) -> Row:
        return {"loss": 2.05 + 0.14 * (step >= 3000) + 0.02 * float(chance.normal())}

    found = judge(rows(1, 6000, make))
    assert [one["onset_step"] for one in found.told] == [3000]
    assert "TrainingLossSetback" in found.told[0]["alerts"]  # 12 % of the life so far: hundreds of steps later


def test_two_levels_two_thousand_steps_apart_are_two_pages() -> None:
    found = run(high(110_000, FOR_EVER, 0.14), last=112_000)
    assert [one["onset_step"] for one in found.pages] == [108_000, 110_000]


def test_a_spike_out_of_a_settled_level_is_an_incident_of_its_own() -> None:
    found = run(high(109_000, 109_010, 0.5), last=110_500)
    assert [(one["onset_step"], one["severity"]) for one in found.told] == [(108_000, "critical"), (109_000, "warning")]


def test_a_spike_while_the_level_has_not_settled_joins() -> None:
    found = run(high(108_150, 108_155, 0.3))
    assert [one["onset_step"] for one in found.told] == [108_000]


def test_a_loss_that_came_back_and_rises_again_is_another_event() -> None:
    found = run(high(108_120, FOR_EVER, -0.14), high(108_400, FOR_EVER, 0.14), last=109_500)
    assert [one["onset_step"] for one in found.told][:2] == [108_000, 108_400]


@pytest.mark.parametrize("at", [108_110, 108_150, 108_800])
def test_a_nan_behind_a_level_that_was_handed_over_pages_once(at: int) -> None:
    found = run(high(at, FOR_EVER, math.nan), last=112_000)
    assert [one["verdict"] for one in found.pages] == ["level_shift", "nonfinite"]
    assert at - 30 <= found.pages[1]["onset_step"] <= at  # what lay high before it leads up to it


def test_a_nan_that_comes_and_goes_for_ever_is_one_page() -> None:
    found = run(lambda step: math.nan if step >= 108_800 and step % 40 < 20 else 0.0, last=112_000)
    assert [one["verdict"] for one in found.pages] == ["level_shift", "nonfinite"]


def test_a_loss_that_runs_away_behind_a_level_that_was_handed_over_pages_again() -> None:
    found = run(lambda step: 0.005 * max(0, step - 108_110), last=109_500)
    assert len(found.pages) == 2
    assert found.pages[1]["verdict"] == "divergence"


def shift_then(*changes: Change, **values: Any) -> tuple[Played, Attempt]:
    attempt = Attempt(changes=[shifted(800, 0.3), *changes], end=None, **values)
    played = acting(default_pack())
    played.play(attempt, live=True, upto=860)
    return played, attempt


def dismissed(*changes: Change, last: int = 1300) -> Played:
    played, attempt = shift_then(*changes, last=last)
    (incident,) = [one for one in played.incidents if one["severity"] != "info"]
    played.take(Command("dismiss", "ann", attempt.time(860), incident["id"]))
    for line in attempt.lines():
        if isinstance(line, Step) and line.step > 860:
            played.take(Steps(attempt.who, 0, (line,)))
    return played


def told(played: Played) -> list[dict[str, Any]]:
    found = [one for one in played.incidents if one["severity"] != "info"]
    return sorted(found, key=lambda one: int(one["opened_step"]))


def test_what_a_person_dismissed_takes_its_own_fault_into_itself() -> None:
    assert [one["state"] for one in told(dismissed())] == ["dismissed"]


def test_what_a_person_dismissed_hides_no_nan() -> None:
    found = told(dismissed(not_a_number(900)))
    assert [one["verdict"] for one in found] == ["level_shift", "nonfinite"]
    assert found[1]["severity"] == "critical"


def test_a_graver_fault_may_still_be_rolled_back_and_goes_behind_the_first_one() -> None:
    nan = told(dismissed(not_a_number(900)))[1]
    assert nan["plan"] is not None
    assert nan["plan"]["target"]["step"] < 800


def test_a_spike_that_was_dismissed_hides_no_level() -> None:
    played = acting(default_pack())
    attempt = Attempt(changes=[shifted(800, 0.3)], last=1300, end=None)
    played.play(attempt, live=True, upto=804)
    played.take(Command("dismiss", "ann", attempt.time(804), told(played)[0]["id"]))
    rest = [line for line in attempt.lines() if isinstance(line, Step) and line.step > 804]
    played.take(Steps(attempt.who, 0, tuple(rest)))
    assert [(one["state"], one["severity"]) for one in told(played)] == [
        ("dismissed", "warning"),
        ("awaiting_approval", "critical"),
    ]


def after_a_mismatch(acknowledged: bool) -> Played:
    """A rollback that was not applied as planned, and its fault again in the next attempt."""
    played = acting()
    played.play(Attempt(changes=[dirty(351, 400)], end="signal"), live=True, upto=375)
    plan = plan_in(only(played.incidents))
    assert plan.target is not None
    wrong = under(plan, not_applied={"skip_samples": "the loader cannot"})
    first = plan.target.step + 1
    again = Attempt(number=1, first=first, changes=[dirty(351, 400)], start=wrong, began=BEGIN + 1e4, last=500)
    played.play(again, live=True, upto=first + 1)
    if acknowledged:
        played.take(Command("acknowledge", "ann", BEGIN + 1e4, only(played.incidents)["id"]))
    for line in again.lines():
        if isinstance(line, Step) and line.step > first + 1:
            played.take(Steps(again.who, 0, (line,)))
            played.take(seen(again, line.time, line.seq))
    return played


def test_after_a_rollback_that_was_not_applied_the_next_one_waits_for_a_person() -> None:
    played = after_a_mismatch(acknowledged=False)
    first, second = played.incidents
    assert (first["state"], first["verdict"]) == ("escalated", "mismatch")
    assert (second["state"], second["action"], second["held_by"]) == ("awaiting_approval", "rollback", "approval")
    assert len(played.rollbacks) == 1


def test_once_a_person_has_acknowledged_it_the_next_one_is_made() -> None:
    played = after_a_mismatch(acknowledged=True)
    assert len(played.rollbacks) == 2


def left_open(end: str | None) -> tuple[Played, Attempt]:
    played = acting(default_pack(), mode="observe")
    attempt = Attempt(changes=[shifted(540, 0.5)], last=560, end=end)
    played.play(attempt, live=True)
    assert only(told(played))["state"] == "confirmed"
    return played, attempt


def test_what_a_dead_run_left_open_is_closed_after_a_day() -> None:
    played, attempt = left_open("signal")
    end = attempt.time(560)
    for hour in range(24):
        played.take(Tick(end + 3600 * hour))
    assert only(told(played))["state"] == "confirmed"
    played.state = load(dump(played.state), played.state.settings, default_pack())
    played.take(Tick(end + 86_400 + 60))
    found = only(told(played))
    assert (found["state"], found["closed_step"]) == ("inconclusive", 560)
    assert "ended (signal) and no other began for 24 h" in found["timeline"][-1]["says"]


def test_what_a_run_left_open_that_is_seen_no_more_is_closed_after_a_day() -> None:
    played, attempt = left_open(None)
    end = attempt.time(560)
    for hour in range(26):
        played.take(seen(attempt, end + 3600 * hour, 0, reachable=False))
        played.take(Tick(end + 3600 * hour))
    assert [one["state"] for one in told(played)] == ["inconclusive"]


def test_what_happens_to_a_run_that_lives_closes_nothing() -> None:
    played, attempt = left_open(None)
    end = attempt.time(560)
    for hour in range(26):
        played.take(seen(attempt, end + 3600 * hour, 561, caught_up=False))
        played.take(Tick(end + 3600 * hour))
    assert [one["state"] for one in told(played)] == ["confirmed"]


@pytest.mark.parametrize("chunk", [13, 60, 1000])
def test_any_cut_and_any_restart_give_the_same_incidents(chunk: int) -> None:
    changes = [shifted(800, 0.3), not_a_number(1150)]
    whole, cut = acting(default_pack()), acting(default_pack())
    attempt = Attempt(changes=changes, last=1300, end=None, checkpoint_every=0)
    whole.play(attempt, chunk=3)
    held = [line for line in attempt.lines() if isinstance(line, Step)]
    cut.play(attempt, upto=0)
    for place in range(0, len(held), chunk):
        cut.take(Steps(attempt.who, 0, tuple(held[place : place + chunk])))
        if place // chunk % 3 == 1:
            cut.state = load(dump(cut.state), cut.state.settings, default_pack())
    other = sorted(cut.incidents, key=lambda one: str(one["id"]))
    assert [one["verdict"] for one in told(whole)] == ["level_shift", "nonfinite"]
    assert other == sorted(whole.incidents, key=lambda one: str(one["id"]))


@pytest.mark.parametrize("by", [0.03, 0.05, 0.14])
def test_a_second_level_that_only_the_slow_rules_see_is_no_part_of_the_first(by: float) -> None:
    found = run(high(110_000, FOR_EVER, by), last=112_000)
    assert [one["severity"] for one in found.told if one["opened_step"] >= 110_000] == ["critical"]
