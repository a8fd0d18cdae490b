"""How long a phase may go on without a sign, what it is learned from, and that it is the same however the records are cut."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.rules.core.runs import core
from trainwarden.record import Event, Step
from trainwarden.rules.core.feed import dump, load
from trainwarden.rules.core.inputs import Happened, Input, SourceSeen, Start, Steps
from trainwarden.rules.core.progress import Progress, answered, budget, happened, idle, stepped
from trainwarden.rules.core.settings import Settings
from trainwarden.rules.core.state import Memory
from trainwarden.rules.core.stream import Cursor
from trainwarden.rules.core.trace import Trace

SETTINGS = Settings()


class Learning:
    """A start's progress with its trace, by a clock."""

    def __init__(self, phase: str | None = "train") -> None:
        self.progress, self.trace = Progress(), Trace(limit=4000)
        self.phase, self.clock, self.step = phase, 0.0, 0
        self.say("start")

    def say(self, kind: str, **fields: object) -> Learning:
        last = float(self.trace.times()[-1]) if len(self.trace) else float("nan")
        happened(self.progress, Event(kind=kind, time=self.clock, fields=dict(fields)), last)
        return self

    def steps(self, count: int, seconds: float) -> Learning:
        for _ in range(count):
            self.step, self.clock = self.step + 1, self.clock + seconds
            record = Step(seq=self.step, step=self.step, time=self.clock, phase=self.phase)
            stepped(self.progress, [record], leads=True)
            self.trace.append(record)
        return self

    def spend(self, phase: str, *durations: float) -> Learning:
        for seconds in durations:
            self.say("phase", phase=phase)
            self.clock += seconds
            self.say("phase", phase="train").steps(1, 1.0)
        return self

    def budget(self, phase: str = "train") -> float:
        if phase != self.progress.phase:
            self.say("phase", phase=phase)
        return budget(self.progress, self.trace, SETTINGS)


@pytest.mark.parametrize(
    ("seconds", "allowed"),
    [(1.0, 900.0), (60.0, 1200.0), (105.0, 1800.0), (600.0, 1800.0), (1000.0, 3000.0)],
)
def test_a_step_may_take_twenty_usual_ones_within_limits(seconds: float, allowed: float) -> None:
    learned = Learning().spend("evaluation", 5.0).steps(50, seconds)
    assert learned.budget() == allowed


def test_a_pause_that_was_none_to_speak_of_doubles_only_where_nobody_says_the_phase() -> None:
    assert Learning(None).steps(50, 1.0).steps(1, 700.0).steps(50, 1.0).budget() == 1400.0
    assert Learning().spend("evaluation", 5.0).steps(50, 1.0).steps(1, 700.0).steps(50, 1.0).budget() == 900.0
    assert Learning(None).steps(50, 1.0).steps(1, 20_000.0).steps(50, 1.0).budget() == 900.0


def test_an_evaluation_may_take_twice_its_longest_but_one() -> None:
    learned = Learning().steps(5, 1.0)
    assert learned.budget("evaluation") == 3600.0
    assert learned.spend("evaluation", 4000.0).budget("evaluation") == 8000.0
    assert Learning().steps(5, 1.0).spend("evaluation", 720.0, 720.0, 720.0).budget("evaluation") == 1440.0
    assert Learning().steps(5, 1.0).spend("evaluation", 60.0, 60.0, 60.0).budget("evaluation") == 900.0


def test_a_hang_teaches_nothing_and_two_long_ones_do() -> None:
    usual = [720.0, 730.0, 710.0, 720.0]
    assert Learning().steps(5, 1.0).spend("evaluation", *usual, 10_000.0).budget("evaluation") == 1460.0
    assert Learning().steps(5, 1.0).spend("evaluation", *usual, 10_000.0, 9000.0).budget("evaluation") == 18_000.0


def test_an_evaluation_that_is_told_afterwards_makes_room_for_the_next() -> None:
    learned = Learning(None).steps(50, 1.0)
    learned.clock += 2000.0
    learned.say("evaluation", loss=2.0).steps(50, 1.0)
    assert learned.budget() == 4000.0


def test_a_checkpoint_that_another_thread_reports_is_no_sign() -> None:
    learned = Learning().steps(5, 1.0)
    assert idle(learned.progress, 1000.0) == 0.0
    assert idle(learned.say("checkpoint", path="c", complete=True).progress, 1500.0) == 500.0
    assert idle(learned.say("phase", phase="data").progress, 1600.0) == 0.0
    assert learned.say("checkpoint", state="begin").progress.phase == "checkpoint"
    assert learned.say("checkpoint", state="end").progress.phase == "train"


def test_a_phase_of_the_users_own_is_training() -> None:
    assert Learning("pretrain").steps(50, 105.0).progress.phase == "train"
    assert Learning("eval").steps(1, 105.0).progress.phase == "evaluation"


def seen(time: float, seq: int, **more: bool) -> SourceSeen:
    facts = {"caught_up": True, "authenticated": False, "may_act": False, **more}
    return SourceSeen(Start("u", "r", 0, "s"), 0, time, seq, **facts)


def test_a_source_that_answers_and_has_nothing_newer_is_needed() -> None:
    cursors = {0: Cursor(last_seq=7), 1: Cursor(last_seq=7)}
    assert answered({0: seen(100.0, 7)}, cursors, 150.0, 60.0) is True
    assert answered({0: seen(100.0, 8)}, cursors, 150.0, 60.0) is False
    assert answered({0: seen(100.0, 7, caught_up=False)}, cursors, 150.0, 60.0) is False
    assert answered({0: seen(100.0, 7)}, cursors, 161.0, 60.0) is None
    assert answered({0: seen(100.0, 7, reachable=False)}, cursors, 150.0, 60.0) is None
    assert answered({}, cursors, 150.0, 60.0) is None
    one_away = {0: seen(100.0, 7, reachable=False), 1: seen(100.0, 7)}
    assert answered(one_away, cursors, 150.0, 60.0) is True
    assert answered({0: seen(100.0, 7, caught_up=False), 1: seen(100.0, 7)}, cursors, 150.0, 60.0) is False


WHO = Start("uid", "run", 0, "start")


def lines() -> list[Step | Event]:
    """Return a start in which records and events tell of phases."""
    found: list[Step | Event] = [Event(kind="start", time=0.0, seq=1, step=0, fields={"world_size": 1})]
    for step in range(1, 121):
        phase = "eval" if step % 40 == 0 else None if step > 100 else "train"
        time = 10.0 * step + 300.0 * (step // 40)
        found.append(Step(seq=len(found) + 1, step=step, time=time, signals={"loss": 2.0 + step % 7}, phase=phase))
        if step % 25 == 0:
            fields = {"path": f"c{step}", "complete": True}
            found.append(Event(kind="checkpoint", time=time + 1, seq=len(found) + 1, step=step, fields=fields))
        if step in (30, 70):
            for phase in ("evaluation", "train"):
                time += 2.5
                event = Event(kind="phase", time=time, seq=len(found) + 1, step=step, fields={"phase": phase})
                found.append(event)
    return found


def after(cuts: Sequence[int], reload: bool = False) -> Memory:
    played = core()
    parts: list[Input] = []
    for first, end in pairwise(sorted({0, *cuts, len(lines())})):
        held: list[Step] = []
        for line in [*lines()[first:end], None]:
            if isinstance(line, Step):
                held.append(line)
                continue
            if held:
                parts.append(Steps(WHO, 0, tuple(held)))
                held = []
            if line is not None:
                parts.append(Happened(WHO, 0, line))
    for part in parts:
        if reload:
            played.state = load(dump(played.state), Settings(), played.state.pack)
        played.take(part)
    memory: Memory = played.state.memory
    return memory


@settings(max_examples=25, deadline=None)
@given(cuts=st.sets(st.integers(1, 120), max_size=30), reload=st.booleans())
def test_any_cut_and_any_restart_remember_the_same(cuts: set[int], reload: bool) -> None:
    whole, cut = after([]).runs["uid"], after(sorted(cuts), reload).runs["uid"]
    assert whole.alive is not None
    assert cut.alive is not None
    assert msgspec.to_builtins(cut.alive.progress) == msgspec.to_builtins(whole.alive.progress)
    assert cut.events == whole.events
    assert len(whole.alive.progress.spent["evaluation"]) == 4
    assert whole.events.steps == {"checkpoint": [25, 50, 75, 100], "evaluation": [30, 70]}
