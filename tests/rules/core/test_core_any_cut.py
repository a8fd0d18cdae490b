"""However the records are cut, and wherever the state was stored and read back: the same incidents and the same requests."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.rules.core.runs import (
    BEGIN,
    Attempt,
    Played,
    acting,
    core,
    dirty,
    gradients,
    plan_in,
    small_pack,
    spike,
    substituted,
    under,
)
from trainwarden.record import Event, Step
from trainwarden.rules.core.feed import dump, feed, load
from trainwarden.rules.core.inputs import Happened, Input, Steps
from trainwarden.rules.core.settings import Settings
from trainwarden.rules.core.state import StateError

ATTEMPT = Attempt(changes=[dirty(351, 400), spike({200: 3.0, 201: 2.0, 202: 1.5, 203: 1.0}), gradients({120: 20.0})])


def rows(played: Played) -> list[dict[str, Any]]:
    return sorted(played.incidents, key=lambda row: str(row["id"]))


@pytest.fixture(scope="module")
def whole() -> list[dict[str, Any]]:
    played = core()
    played.play(ATTEMPT)
    assert len(rows(played)) >= 2
    return rows(played)


@settings(max_examples=12, deadline=None)
@given(sizes=st.lists(st.integers(1, 120), min_size=4, max_size=12))
def test_any_cut_of_the_records_gives_the_same_incidents(sizes: list[int], whole: list[dict[str, Any]]) -> None:
    played = core()
    held: list[Step] = []
    cuts = iter(sizes * 200)
    size = next(cuts)
    for line in ATTEMPT.lines():
        if isinstance(line, Event) or len(held) >= size:
            if held:
                played.take(Steps(ATTEMPT.who, 0, tuple(held)))
            held, size = [], next(cuts)
        if isinstance(line, Event):
            played.take(Happened(ATTEMPT.who, 0, line))
        else:
            held.append(line)
    assert rows(played) == whole


def both_attempts() -> list[Input]:
    """All inputs of the demo's loop as a live daemon gets them."""
    taken: list[Input] = []
    played = acting()
    through = played.take

    def keep(value: Input) -> Any:
        taken.append(value)
        return through(value)

    played.take = keep  # type: ignore[method-assign]
    played.play(Attempt(changes=[dirty(351, 400)], end="signal"), live=True, upto=372)
    plan = plan_in(played.incidents[0])
    assert plan.target is not None
    again = Attempt(
        number=1, first=plan.target.step + 1, changes=[substituted(plan)], start=under(plan), began=BEGIN + 1e4
    )
    played.play(again, live=True, chunk=7)
    assert played.incidents[0]["state"] == "recovered"
    return taken


@pytest.fixture(scope="module")
def inputs() -> list[Input]:
    return both_attempts()


SETTINGS = Settings(mode="act", receiver=True)


@settings(max_examples=10, deadline=None)
@given(share=st.floats(0.0, 1.0))
def test_a_state_that_is_stored_and_read_back_anywhere_has_the_same_later_effects(
    share: float, inputs: list[Input]
) -> None:
    place = int(share * len(inputs))
    one = acting().state
    for value in inputs[:place]:
        feed(one, value)
    other = load(dump(one), SETTINGS, small_pack())
    for value in inputs[place:]:
        assert feed(other, value) == feed(one, value)
    assert dump(other) == dump(one)


def test_the_state_survives_in_the_middle_of_the_incident_of_the_verification_and_of_waiting_ranks(
    inputs: list[Input],
) -> None:
    one = acting().state
    for number, value in enumerate(inputs):
        feed(one, value)
        if number % 40 == 7:
            one = load(dump(one), SETTINGS, small_pack())
    (run,) = one.memory.runs.values()
    assert [incident.state for incident in run.incidents.values()] == ["recovered"]


def test_a_state_of_another_version_is_refused_with_advice() -> None:
    with pytest.raises(StateError, match="delete it"):
        load({"": b"\x01"}, SETTINGS, small_pack())


def test_the_stored_state_of_a_long_healthy_run_is_bounded() -> None:
    played = core(history_steps=300)
    played.play(Attempt(last=1500, end=None), chunk=50)
    early = sum(map(len, dump(played.state).values()))
    played.play(Attempt(last=2500, end=None), chunk=50)
    assert sum(map(len, dump(played.state).values())) < 1.3 * early
