"""Rows that an event names as damaged are evidence of the incident around them, in a young run too."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import pytest

from tests.rules.core.made_up_facts import facts
from tests.rules.core.runs import Attempt, core, not_a_number, only, shifted
from trainwarden.record import Event, Step
from trainwarden.rules.core.attribution import attribute
from trainwarden.rules.core.attribution.damaged_rows import RULE, find
from trainwarden.rules.core.damaged import MOST, Damaged, first, sentence, take
from trainwarden.rules.core.facts import NotPossible
from trainwarden.rules.core.feed import dump, load

TOLD: dict[str, Any] = {
    "table": "token",
    "nonfinite": 0,
    "long": 1,
    "lost": 0,
    "ids": [7],
    "norms": [1035.4],
    "median": 5.471,
}
SAYS = "The row of token 7 was found damaged in the embedding at step 157: norm 1035 against a median of 5.471."
ROUTER = ("TrainingRouterLogitGrowth", "model", 311, 0.0255)


def event(step: int | None, **changes: Any) -> Event:
    return Event(kind="embedding_rows", time=0.0, step=step, fields={**TOLD, **changes})


def known(*told: tuple[int, Event]) -> list[Damaged]:
    found: list[Damaged] = []
    for rank, one in told:
        take(found, rank, one)
    return found


def damaged(step: int = 307, **changes: Any) -> tuple[Damaged, ...]:
    return tuple(known((0, event(step, **changes))))


@dataclass
class Looking(Attempt):
    """An attempt whose exporter tells of damaged rows before the record of the step."""

    told: dict[int, dict[str, Any]] = field(default_factory=dict)

    def lines(self) -> Iterator[Step | Event]:
        late = 0
        for line in super().lines():
            if isinstance(line, Step) and line.step in self.told:
                fields = self.told[line.step]
                yield Event(kind="embedding_rows", time=line.time, seq=line.seq + late, step=line.step, fields=fields)
                late += 1
            line.seq += late
            yield line


@pytest.mark.parametrize(
    ("told", "says"),
    [
        ([(0, event(157))], SAYS),
        ([(1, event(157))], SAYS.replace("step 157", "step 157, on rank 1")),
        # Every rank of a replicated model tells the same.
        ([(0, event(157)), (1, event(157))], SAYS),
        (
            [(0, event(157, table="head", ids=[9, 12], norms=[80.0, 70.0], median=None))],
            "The rows of tokens 9, 12 were found damaged in the head at step 157: norm 80.",
        ),
        (
            [(0, event(157, nonfinite=1, long=0, norms=["NaN"]))],
            "The row of token 7 was found damaged in the embedding at step 157: not finite.",
        ),
        (
            [(0, event(157, ids=list(range(8)), norms=[80.0] * 8, long=50))],
            "The rows of tokens 0, 1, 2, 3, 4, 5, 6, 7 and 42 more were found damaged in the embedding at step 157: norm 80 against a "
            "median of 5.471.",
        ),
    ],
)
def test_damaged_rows_are_said_with_their_tokens(told: list[tuple[int, Event]], says: str) -> None:
    assert sentence(first(known(*told), 100, 200)) == says


def test_damaged_rows_speak_for_the_data_and_ask_what_the_token_is() -> None:
    level = facts(shifted(301, 1.0))
    assert isinstance(find(level), NotPossible)
    (found,) = find(replace(level, damaged=damaged()))
    assert (found.kind, found.step, found.cause) == ("damaged_rows", 307, "data")
    assert "token 7" in found.says
    assert "what token 7 is" in attribute(replace(level, damaged=damaged())).cheapest_test


def test_a_rule_that_blames_the_model_behind_the_onset_gives_way_to_the_row_and_one_before_it_does_not() -> None:
    level = replace(facts(shifted(301, 1.0), each=unread), blamed=(ROUTER,))
    assert attribute(level).name == "model"
    assert attribute(replace(level, damaged=damaged())).name == "data"
    grew = (*ROUTER[:2], 250, ROUTER[3])
    assert all(one.cause != "model" for one in find(replace(level, blamed=(grew,), damaged=damaged())))


def unread(line: Step) -> None:
    """Take the batch's fingerprint from a record: the exporter does not see what the model reads."""
    for name in [name for name in line.signals if name.startswith("batch_")]:
        del line.signals[name]


def test_batches_that_are_as_before_leave_the_cause_open() -> None:
    cause = attribute(replace(facts(shifted(301, 1.0)), damaged=damaged()))
    assert cause.name != "data"


def test_where_the_rule_on_such_rows_speaks_itself_the_event_is_no_second_witness() -> None:
    alone = replace(facts(shifted(301, 1.0)), blamed=((RULE, "data", 307, 1.0),))
    both = replace(alone, damaged=damaged())
    assert attribute(both).scores == attribute(alone).scores
    assert [one.says for one in find(both)] == [sentence(both.damaged)]


@pytest.mark.parametrize(
    ("around", "found"),
    [
        # Any overflow leaves rows like these.
        (facts(shifted(301, 1.0)), damaged(nonfinite=1, norms=["NaN"])),
        (facts(shifted(301, 1.0)), damaged(ids=list(range(8)), norms=[80.0] * 8)),
        (facts(not_a_number(301)), damaged()),
        # Longer after the onset than a look is away from the next.
        (facts(shifted(301, 1.0), last=450), damaged(step=402)),
    ],
)
def test_what_may_have_followed_is_named_and_weighs_nothing(around: Any, found: tuple[Damaged, ...]) -> None:
    told = replace(around, damaged=found)
    (one,) = find(told)
    assert (one.cause, one.weight, one.test) == ("", 0.0, "")
    assert "found damaged" in one.says
    assert attribute(told).scores == attribute(around).scores


@pytest.mark.parametrize(
    "changes",
    [
        {"table": "positions"},
        {"table": None},
        {"ids": []},
        {"ids": ["7"]},
        {"ids": [True]},
        {"ids": [-1]},
        {"ids": 7},
        {"ids": list(range(1000))},
    ],
)
def test_events_that_name_no_table_or_token_are_passed_over(changes: dict[str, Any]) -> None:
    assert known((0, event(5, **changes)), (0, event(None))) == []


def test_numbers_that_are_missing_are_unknown_and_memory_is_bounded() -> None:
    (odd,) = known((0, event(5, norms=None, median="x", long="many")))
    assert (odd.ids, odd.rows) == ((7,), 1)
    assert math.isnan(odd.norms[0])
    assert math.isnan(odd.median)
    assert len(known(*((0, event(step)) for step in range(3 * MOST)))) == MOST


def test_in_a_young_run_the_event_alone_makes_the_incident_name_the_token() -> None:
    run = core()
    run.play(Looking(last=300, changes=[shifted(151, 1.0)], told={157: TOLD}))
    incident = only(run.incidents)
    assert SAYS in [one["says"] for one in incident["evidence"] if one["kind"] == "damaged_rows"]
    assert SAYS[1:-1] in incident["summary"]


@pytest.mark.parametrize(("step", "its"), [(340, True), (200, False)])
def test_rows_that_were_damaged_up_to_a_look_before_the_onset_are_the_incidents_and_older_ones_not(
    step: int, its: bool
) -> None:
    run = core()
    run.play(Looking(last=450, changes=[shifted(401, 1.0)], told={step: TOLD}))
    assert any(one["kind"] == "damaged_rows" for one in only(run.incidents)["evidence"]) is its


def test_what_was_found_damaged_outlives_a_restart_of_the_daemon() -> None:
    run = core()
    run.play(Looking(last=160, changes=[shifted(151, 1.0)], told={157: TOLD}, end=None))
    state = run.state
    again = load(dump(state), state.settings, state.pack, state.engines)
    (kept,) = [one.alive.damaged for one in again.memory.runs.values() if one.alive is not None]
    assert [(one.step, one.ids) for one in kept] == [(157, (7,))]
