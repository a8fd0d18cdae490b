"""A resumed start: what it is compared with survives any cut and any restart, and is bounded."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.rules.core.runs import Attempt, Played, default_pack, small_pack
from trainwarden.record import Event, Step
from trainwarden.rules.core.feed import dump, feed, load, new_state
from trainwarden.rules.core.inputs import Happened, Input, Steps
from trainwarden.rules.core.lineage import INHERITED
from trainwarden.rules.core.resumed import Planned, parent_of, restore_check
from trainwarden.rules.core.settings import Settings
from trainwarden.rules.core.trace import Trace, joined

SETTINGS = Settings(mode="act", receiver=True)
PACK = default_pack()
RESUMED = {"resumed_from": {"attempt": 0, "step": 200, "path": "ckpt/0/200"}}


def wrong(step: int, signals: dict[str, Any]) -> None:
    """A counter and a rate that begin anew, and a loss that is better: everything that a resume can get wrong."""
    signals["loss"] -= 0.15
    signals["lr"] = {"all": 1e-5 * (step - 200)}
    if "optimizer_step" in signals:
        signals["optimizer_step"] -= 200


def inputs(size: int, *changes: Any) -> list[Input]:
    """Two attempts, the second of which resumed 20 steps before the end of the first."""
    taken: list[Input] = []
    first = Attempt(last=220, end="signal")
    second = Attempt(number=1, first=201, last=330, start=RESUMED, changes=changes, began=first.began + 1e4)
    for attempt in (first, second):
        held: list[Step] = []
        for line in attempt.lines():
            if isinstance(line, Step):
                held.append(line)
            if held and (isinstance(line, Event) or len(held) >= size):
                taken.append(Steps(attempt.who, 0, tuple(held)))
                held = []
            if isinstance(line, Event):
                taken.append(Happened(attempt.who, 0, line))
    return taken


def played(taken: list[Input], again: int = 0) -> tuple[list[Any], list[Any]]:
    """Feed all; ``again`` stores the state and reads it back every so many inputs."""
    found = Played(new_state(SETTINGS, PACK))
    for number, value in enumerate(taken):
        found.take(value)
        if again and number % again == again - 1:
            found.state = load(dump(found.state), SETTINGS, PACK)
    incidents = sorted(found.incidents, key=lambda row: str(row["id"]))
    notices = sorted({(str(row["kind"]), row["step"], str(row["says"])) for row in found.notices})
    return incidents, notices


@pytest.fixture(scope="module")
def whole() -> tuple[list[Any], list[Any]]:
    found = played(inputs(4096, wrong))
    alerts = {name for one in found[0] for name in one["alerts"]}
    assert {"TrainingResumeLr", "TrainingResumeOptimizerStep", "TrainingResumeLevel"} <= alerts
    assert {"resume", "steps_repeated"} <= {kind for kind, _, _ in found[1]}
    return found


@settings(max_examples=8, deadline=None)
@given(size=st.integers(1, 130), again=st.integers(0, 6))
def test_any_cut_and_any_restart_gives_the_same_incidents_and_notices(
    size: int, again: int, whole: tuple[list[Any], list[Any]]
) -> None:
    assert played(inputs(size, wrong), again) == whole


@pytest.mark.parametrize(("begun", "fires"), [(0, False), (20, True)])
def test_a_rate_that_stays_where_a_short_warm_up_left_it_is_restored(begun: int, fires: bool) -> None:
    """The line through the warm-up would lead further up; a schedule that begins anew is seen all the same."""

    def warmed(since: int) -> Callable[[int, dict[str, Any]], None]:
        def change(step: int, signals: dict[str, Any]) -> None:
            signals["lr"] = {"all": 1e-3 * min(1.0, (step - since) / 5)}

        return change

    source = {"resumed_from": {"attempt": 0, "step": 20, "path": "c"}}
    found = Played(new_state(SETTINGS, PACK))
    for attempt in (
        Attempt(last=20, changes=[warmed(0)]),
        Attempt(number=1, first=21, last=60, start=source, changes=[warmed(begun)], began=1e9 + 1e4),
    ):
        for line in attempt.lines():
            found.take(Steps(attempt.who, 0, (line,)) if isinstance(line, Step) else Happened(attempt.who, 0, line))
    assert any("TrainingResumeLr" in one["alerts"] for one in found.incidents) is fires


@pytest.mark.parametrize(
    ("ranks", "batch", "goes_back", "fires"),
    [
        ((2, 1), (32, 16), 0, False),  # a step reads half as much
        ((2, 1), (32, 32), 0, False),  # the accumulation was doubled
        ((1, 2), (16, 32), 0, False),
        ((2, 1), (32, 16), 20 * 32, True),  # what was read is read again
        ((1, 2), (16, 160), 0, True),  # no two ranks read ten times as much
        ((2, 2), (32, 16), 0, True),  # nobody told of another batch size
        ((2, 2), (32, 64), 0, True),
    ],
)
@pytest.mark.parametrize("from_step", [220, 200])
def test_positions_of_other_ranks_go_on_where_the_attempt_before_left_off_at_their_own_pace(
    ranks: tuple[int, int], batch: tuple[int, int], goes_back: int, fires: bool, from_step: int
) -> None:
    def first(step: int, signals: dict[str, Any]) -> None:
        signals["sample_position"] = float(step * batch[0])

    def second(step: int, signals: dict[str, Any]) -> None:
        signals["sample_position"] = float(from_step * batch[0] - goes_back + (step - from_step) * batch[1])

    start = {"resumed_from": {"attempt": 0, "step": from_step, "path": f"ckpt/0/{from_step}"}}
    one = Attempt(last=220, end="signal", changes=[first], world_size=ranks[0])
    other = Attempt(
        number=1,
        first=from_step + 1,
        last=330,
        start=start,
        changes=[second],
        began=one.began + 1e4,
        world_size=ranks[1],
    )
    found = Played(new_state(Settings(), PACK))
    for attempt in (one, other):
        found.play(attempt)  # of the other ranks nothing is read
    fired = any("TrainingSampleOrder" in one["alerts"] for one in found.incidents)
    # Half the pace where all that was read lies behind the resume is seen in no number.
    assert fired is (fires and not (ranks == (2, 2) and batch == (32, 16) and from_step == 220))
    (said,) = [notice["says"] for notice in found.notices if notice["kind"] == "resume"]
    assert ("in place of" in said) is (ranks[0] != ranks[1])


def test_what_is_compared_is_forgotten_when_it_is_over() -> None:
    state = new_state(Settings(history_steps=400), small_pack())
    for value in inputs(64):
        feed(state, value)
    (run,) = state.memory.runs.values()
    assert run.alive is not None
    assert run.alive.beyond is not None
    second = Attempt(number=1, first=331, last=1300, start=RESUMED, checkpoint_every=0)
    records = [line for line in second.lines() if isinstance(line, Step)]
    for first in range(0, len(records), 50):
        feed(state, Steps(second.who, 0, tuple(records[first : first + 50])))
    assert run.alive.beyond is None
    assert run.alive.rules.parent is None


def trace(first: int, last: int, **said: Any) -> Trace:
    found = Trace(limit=4000)
    for line in Attempt(first=first, last=last, checkpoint_every=0, **said).lines():
        if isinstance(line, Step):
            found.append(line)
    return found


def test_a_line_is_that_of_the_parents_parent_where_the_parent_was_short() -> None:
    state = new_state(Settings(), small_pack())
    firsts = {0: (1, 300), 1: (301, 310), 2: (311, 320)}
    for number, (first, last) in firsts.items():
        source = {"resumed_from": {"attempt": number - 1, "step": first - 1, "path": "c"}} if number else {}
        attempt = Attempt(number=number, first=first, last=last, start=source, end=None, began=1e9 + 1e4 * number)
        for line in attempt.lines():
            value: Input = Steps(attempt.who, 0, (line,)) if isinstance(line, Step) else Happened(attempt.who, 0, line)
            feed(state, value)
    (run,) = state.memory.runs.values()
    assert run.alive is not None
    assert run.alive.inherited is not None
    assert run.alive.inherited.steps.tolist() == list(range(1, 311))
    assert len(run.alive.inherited) <= INHERITED


def test_joined_traces_hold_what_both_held() -> None:
    one, other, both = trace(1, 60), trace(61, 130), trace(1, 130)
    found = joined(one, other)
    assert found.steps.tolist() == both.steps.tolist()
    for name in both.values:
        np.testing.assert_array_equal(found.column(name), both.column(name))
        np.testing.assert_array_equal(found.measured(name), both.measured(name))
    assert [found.samples(row) for row in range(len(found))] == [both.samples(row) for row in range(len(both))]
    assert [found.shards(row) for row in range(len(found))] == [both.shards(row) for row in range(len(both))]


def test_the_parents_line_has_the_planned_rate_and_not_what_is_changed() -> None:
    older = trace(1, 100)
    plain = parent_of(older, None, 90, Planned()).block.columns
    planned = parent_of(older, None, 90, Planned(0.5, ("reset", "factor"))).block.columns
    np.testing.assert_allclose(planned["lr", "all"].values, 0.5 * plain["lr", "all"].values)
    assert ("optimizer_step",) in plain
    assert {("optimizer_step",), ("loss",), ("update_ratio", "all")}.isdisjoint(planned)


def test_what_was_made_twice_is_compared_step_by_step() -> None:
    older, again = trace(1, 40), trace(31, 60)
    again.values["loss"][4] += 0.25
    found = restore_check(again, older)
    assert found is not None
    step, says = found
    assert step == 40
    assert "10 steps from 31 to 40" in says
    assert "0.25 (at step 35): not the same numbers" in says
    again.values["loss"][:] = math.nan
    assert restore_check(again, older) is None
