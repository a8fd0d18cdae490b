"""Steps wait a bounded time for the other ranks; what happened behind them stays behind them."""

from __future__ import annotations

from typing import Any

import pytest

from trainwarden.exporter import held
from trainwarden.exporter.across import Layout
from trainwarden.exporter.held import Held
from trainwarden.exporter.notices import Notices
from trainwarden.exporter.side import SideGroup


def waiting_side() -> SideGroup:
    """Return a side group whose results never come: the other rank does not exist."""
    return SideGroup(0, 2, "key", Layout({}), "signature", 1.0, Notices(), lambda alike, all_alike: None)


def drain(waiting: Held, until: float | None = None) -> None:
    while (record := waiting.next(until)) is not None:
        record()


def test_without_a_side_group_nothing_waits() -> None:
    done: list[Any] = []
    waiting = Held(None)
    waiting.put(lambda joined: done.append(("step", joined)), step=1)
    waiting.put(lambda joined: done.append(("event", joined)))
    assert done == [("step", None), ("event", None)]
    assert len(waiting) == 0


def test_an_event_stays_behind_the_step_that_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(held, "HOLD_SECONDS", 0.05)
    done: list[str] = []
    waiting = Held(waiting_side())
    waiting.put(lambda joined: done.append("start"))
    assert done == ["start"]  # nothing is before it
    waiting.put(lambda joined: done.append("step 1"), step=1)
    waiting.put(lambda joined: done.append("event"))
    waiting.put(lambda joined: done.append("step 2"), step=2)
    drain(waiting)
    assert done == ["start"]
    drain(waiting, until=0.0)  # the exporter is being closed and its time is over
    assert done == ["start", "step 1", "event", "step 2"]


def test_no_step_waits_for_longer_than_the_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(held, "HOLD_SECONDS", -1.0)
    done: list[int] = []
    waiting = Held(waiting_side())
    waiting.put(lambda joined: done.append(1), step=1)
    drain(waiting)
    assert done == [1]


def test_no_more_than_a_bounded_number_of_steps_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(held, "MOST_HELD", 3)
    done: list[int] = []
    waiting = Held(waiting_side())
    for step in range(1, 6):
        waiting.put(lambda joined, step=step: done.append(step), step=step)  # type: ignore[misc]
        drain(waiting)
    assert done == [1, 2]


def test_a_step_that_is_passed_or_whose_side_group_is_closed_does_not_wait() -> None:
    side = waiting_side()
    done: list[int] = []
    waiting = Held(side)
    side._next = 2
    waiting.put(lambda joined: done.append(1), step=1)
    waiting.put(lambda joined: done.append(2), step=2)
    drain(waiting)
    assert done == [1]
    side.open = False
    drain(waiting)
    assert done == [1, 2]
