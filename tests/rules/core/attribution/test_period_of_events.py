from __future__ import annotations

from dataclasses import replace

import pytest

from tests.rules.core.made_up_facts import at, facts
from trainwarden.record import ShardSpan, Step
from trainwarden.rules.core.attribution import period_of_events
from trainwarden.rules.core.events import Events
from trainwarden.rules.core.facts import Facts, Finding, NotPossible

PEAKS = range(101, 1000, 100)


def spiky(events: Events, each: object = None, **more: object) -> Facts:
    """Spikes of three steps, every hundred."""
    changes = [at(range(peak, peak + 3), loss=lambda loss: loss + 1.0) for peak in PEAKS]
    made = facts(*changes, onset=501, last=990, each=each or shardless, **more)  # type: ignore[arg-type]
    return replace(made, events=events, periodic=(501, 100.0))


def shardless(record: Step) -> None:
    record.shards = []


def says(found: list[Finding]) -> list[str]:
    return [one.says for one in found]


def test_it_says_nothing_where_no_rule_saw_a_period() -> None:
    assert isinstance(period_of_events.find(facts()), NotPossible)


@pytest.mark.parametrize("offset", [0, 1, 40])
def test_events_at_the_same_distance_fit_wherever_they_lie(offset: int) -> None:
    events = Events(steps={"checkpoint": [peak - offset for peak in PEAKS]})
    (found,) = period_of_events.find(spiky(events))
    assert "every 100 steps, as the checkpoints do" in found.says
    assert (found.cause, "without it" in found.test) == ("optimizer_state", True)


def test_events_at_another_distance_or_anywhere_do_not() -> None:
    events = Events(
        steps={"checkpoint": list(range(70, 990, 70)), "evaluation": [100, 230, 290, 430, 480, 610, 700, 820]}
    )
    (found,) = period_of_events.find(spiky(events))
    assert (found.cause, found.weight) == ("", 0.0)
    assert "nothing does that is known of" in found.says
    assert "the checkpoints every 70" in found.says


def test_shards_epochs_and_restarts_of_the_rate_are_seen_in_the_records() -> None:
    def shards(record: Step) -> None:
        number = (record.step - 1) // 100
        record.shards = [ShardSpan(f"s{number}", number * 1600, (number + 1) * 1600)]

    def epochs(record: Step) -> None:
        record.shards = []
        record.signals["epoch"] = (record.step - 1) / 100

    def rates(record: Step) -> None:
        record.shards = []
        record.signals["lr"] = {"all": 1e-3 * (1 - (record.step - 1) % 100 / 110)}

    found = {each: period_of_events.find(spiky(Events(), each)) for each in (shards, epochs, rates)}
    assert [one.cause for one in found[shards]] == ["data"]
    assert "as the shards do, at the same step" in found[shards][0].says
    assert [(one.cause, "the epochs" in one.says) for one in found[epochs]] == [("data", True)]
    assert [(one.cause, "the learning rate's phases" in one.says) for one in found[rates]] == [("learning_rate", True)]
