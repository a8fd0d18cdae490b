"""Order of arrival is one file's business, and nothing else notices it."""

from __future__ import annotations

import itertools

import pytest

from tests.rules.core.runs import Attempt, core, seen
from trainwarden.record import Event, Step
from trainwarden.rules.core.inputs import Happened, Steps, Tick
from trainwarden.rules.core.stream import Cursor, Gap, Line, admit, flush, pass_time, take


def record(step: int, seq: int | None = None, time: float | None = None, **signals: float) -> Step:
    return Step(
        seq=step if seq is None else seq,
        step=step,
        time=float(step) if time is None else time,
        signals={"loss": 1.0, **signals},
        samples=[(10 * step, 10 * step + 5)],
    )


def steps(released: list) -> list[int]:  # type: ignore[type-arg]
    return [one.record.step for one in released]


def test_one_rank_is_released_at_once() -> None:
    line = Line()
    assert steps(take(line, 0, record(1), 64, 20.0)) == [1]


def test_a_line_that_was_seen_is_dropped_and_a_gap_is_told_once() -> None:
    line = Line()
    assert admit(line, 0, 1) is True
    assert admit(line, 0, 1) is False
    assert admit(line, 0, 5) == Gap(0, 5, 3)
    assert admit(line, 0, 6) is True
    assert (line.duplicates, line.missed) == (1, 3)


def test_lines_without_a_number_are_always_taken() -> None:
    line = Line()
    assert admit(line, 0, 0) is True
    assert admit(line, 0, 0) is True


@pytest.mark.parametrize("order", list(itertools.permutations(range(4))))
def test_a_step_is_released_when_all_ranks_reported_whatever_their_order(order: tuple[int, ...]) -> None:
    line = Line(world_size=4)
    found = []
    for step in (1, 2):
        for rank in order:
            found += take(line, rank, record(step, loss=float(rank)), 64, 20.0)
    assert steps(found) == [1, 2]
    assert list(found[0].by_rank) == [0, 1, 2, 3]
    assert found[0].record.signals["loss"] == 0.0


def test_a_rank_that_stops_reporting_delays_the_others_once() -> None:
    line = Line(world_size=2)
    for step in (1, 2):
        take(line, 0, record(step), 10, 5.0)
        take(line, 1, record(step), 10, 5.0)
    found = []
    for step in range(3, 40):
        found.append(steps(take(line, 0, record(step), 10, 5.0)))
    waited = [number for number, one in enumerate(found) if not one]
    assert waited == list(range(10)), "ten steps are waited for, then all comes at once and one by one"
    assert line.awaited == [0]


def test_a_rank_that_comes_back_is_awaited_again_and_its_late_records_are_counted_only() -> None:
    line = Line(world_size=2, awaited=[0])
    for step in range(1, 5):
        take(line, 0, record(step), 64, 20.0)
    assert take(line, 1, record(2), 64, 20.0) == []
    assert line.late == 1
    assert take(line, 1, record(5), 64, 20.0) == []
    assert line.awaited == [0, 1]
    assert steps(take(line, 0, record(5), 64, 20.0)) == [5]


def test_a_rank_that_is_known_to_catch_up_is_waited_for() -> None:
    line = Line(world_size=2, cursors={1: Cursor(behind=True)})
    assert [one for step in range(1, 500) for one in take(line, 0, record(step), 64, 20.0)] == []
    found = [one for step in range(1, 500) for one in take(line, 1, record(step), 64, 20.0)]
    assert steps(found) == list(range(1, 500))


@pytest.mark.parametrize("world_size", [10_000, 10**15])
def test_a_start_of_very_many_ranks_costs_no_more_than_the_ranks_that_report(world_size: int) -> None:
    line = Line(world_size=world_size)
    found = [one for step in range(1, 300) for one in take(line, 0, record(step), 64, 20.0)]
    assert steps(found) == list(range(1, 300))
    assert line.awaited == [0]


def test_a_rank_whose_clock_stands_still_does_not_make_records_pile_up() -> None:
    line = Line(world_size=2)
    released = sum(len(take(line, 0, record(step, time=1.0), 64, 20.0)) for step in range(1, 20_101))
    assert released == 20_100
    assert not line.pending


def test_time_passes_for_a_missing_rank_too() -> None:
    line = Line(world_size=2)
    take(line, 0, record(1, time=100.0), 64, 20.0)
    assert pass_time(line, 90.0) == []
    assert steps(pass_time(line, 150.0)) == [1]


def test_the_end_of_a_start_releases_what_waits() -> None:
    line = Line(world_size=3)
    take(line, 1, record(1), 64, 20.0)
    take(line, 2, record(2), 64, 20.0)
    assert steps(flush(line)) == [1, 2]
    assert flush(line) == []


def test_parts_of_a_batch_that_ranks_report_each_are_one_batch_together() -> None:
    line = Line(world_size=2)
    mine, theirs = record(1, substituted_samples=2.0), record(1, substituted_samples=1.0)
    theirs.samples = [(15, 20)]
    take(line, 0, mine, 64, 20.0)
    (one,) = take(line, 1, theirs, 64, 20.0)
    assert one.record.samples == [(10, 20)]
    assert one.record.value("substituted_samples") == 3.0


def test_ranks_fed_one_after_the_other_or_step_by_step_give_the_same_state() -> None:
    attempt = Attempt(last=40, world_size=2)
    lines = list(attempt.lines())
    results = []
    for together in (True, False):
        played = core()
        for rank in (0, 1):
            played.take(Happened(attempt.who, rank, lines[0]))  # type: ignore[arg-type]
            played.take(seen(attempt, 0.0, 100, caught_up=False))
        records = [line for line in lines if isinstance(line, Step)]
        orders = [(r, s) for r in (0, 1) for s in records] if together else [(r, s) for s in records for r in (0, 1)]
        for rank, one in orders:
            played.take(Steps(attempt.who, rank, (one,)))
        alive = played.state.memory.runs["uid"].alive
        results.append((alive.line.released, len(alive.trace), alive.line.late))
    assert results[0] == results[1] == (40, 40, 0)


def test_lines_of_a_start_that_is_over_are_counted_and_not_evaluated() -> None:
    played = core()
    old, new = Attempt(last=30, end=None), Attempt(number=1, first=21, last=40, end=None)
    played.play(old)
    played.play(new)
    late = Steps(old.who, 0, (record(31, seq=99),))
    played.take(late)
    run = played.state.memory.runs["uid"]
    assert run.stale_lines == 1
    assert run.alive.start == new.who


def test_a_start_event_that_was_missed_is_no_obstacle_and_counts_when_it_comes() -> None:
    played = core()
    attempt = Attempt(last=30, end=None)
    lines = list(attempt.lines())
    played.take(Steps(attempt.who, 0, tuple(line for line in lines[1:] if isinstance(line, Step))))
    assert "gap" in {notice["kind"] for notice in played.notices}
    start = lines[0]
    assert isinstance(start, Event)
    start.seq = 0  # told by /api/v1/run, not read from the stream
    played.take(Happened(attempt.who, 0, start))
    assert played.state.memory.runs["uid"].alive.can_skip == ["substitute", "shift"]


def test_waiting_records_are_released_by_a_tick_long_after_their_time() -> None:
    played = core()
    attempt = Attempt(last=5, world_size=2, end=None)
    played.play(attempt)
    alive = played.state.memory.runs["uid"].alive
    assert len(alive.trace) == 0
    played.take(Tick(attempt.time(5) + 3600))
    assert len(alive.trace) == 5
