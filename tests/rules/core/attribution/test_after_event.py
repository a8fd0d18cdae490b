from __future__ import annotations

from dataclasses import replace

from tests.rules.core.made_up_facts import facts
from trainwarden.record import Event
from trainwarden.rules.core.attribution import after_event, attribute
from trainwarden.rules.core.events import BEGINNINGS, STEPS, Events, begun, remember
from trainwarden.rules.core.facts import Facts


def happened(*steps: int, kind: str = "evaluation", **fields: object) -> Events:
    events = Events()
    for step in steps:
        remember(events, Event(kind=kind, time=0.0, step=step, fields=dict(fields)))
    return events


def begun_at(events: Events, *onsets: int) -> Facts:
    """The last onset is the incident's own."""
    for onset in onsets:
        begun(events, f"inc {onset}", onset, 1)
    return replace(facts(), onset=onsets[-1], events=events)


def test_once_is_weak_and_twice_behind_rare_events_is_strong() -> None:
    once = after_event.find(begun_at(happened(100, 200, 300), 301))
    assert [(one.cause, one.weight) for one in once] == [("optimizer_state", 0.3), ("data", -0.2)]
    twice = attribute(begun_at(happened(100, 200, 300), 101, 301))
    assert twice.name == "optimizer_state"
    assert "without the evaluation" in twice.cheapest_test


def test_a_spike_before_the_event_or_far_behind_it_is_none_of_it() -> None:
    assert after_event.find(begun_at(happened(100, 200, 302), 301)) == []
    assert after_event.find(begun_at(happened(100, 200, 290), 301)) == []


def test_where_most_spikes_begin_elsewhere_a_second_time_is_no_proof() -> None:
    found = after_event.find(begun_at(happened(100, 200, 300), 50, 101, 130, 160, 301))
    assert (found[0].weight, "3 times elsewhere" in found[0].says) == (0.4, True)


def test_the_same_event_in_the_next_attempt_is_no_second_one() -> None:
    events = happened(100, 200, 300)
    begun(events, "before", 301, 1)
    assert after_event.find(begun_at(events, 301))[0].weight == 0.3


def test_what_only_adds_to_an_event_or_ends_it_is_none() -> None:
    assert happened(100, kind="checkpoint", deleted=True).steps == {}
    assert happened(100, state="end").steps == {}
    assert happened(100, 200, kind="phase", phase="train").steps == {}
    assert happened(200, 100, 200, kind="phase", phase="evaluation").steps == {"evaluation": [100, 200]}


def test_what_is_remembered_is_bounded() -> None:
    events = happened(*range(10 * STEPS))
    for onset in range(10 * BEGINNINGS):
        begun(events, str(onset), onset, 1)
    assert (len(events.steps["evaluation"]), len(events.beginnings)) == (STEPS, BEGINNINGS)
    for number in range(100):
        remember(events, Event(kind=f"own {number}", time=0.0, step=1))
    assert len(events.steps) <= 16


def test_the_checkpoint_that_the_start_was_loaded_from_is_no_occasion_of_it() -> None:
    events = happened(100, 200, 300)
    events.steps["checkpoint"] = events.steps.pop("evaluation")
    at_once = begun_at(events, 301)
    assert after_event.find(at_once)
    assert after_event.find(replace(at_once, resumed_from=300)) == []
