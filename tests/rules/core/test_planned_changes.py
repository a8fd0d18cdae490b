"""A planned change excuses what it announces: in any cut and order of the stream, over restarts, and for nothing else."""

from __future__ import annotations

import math
from collections.abc import Sequence
from copy import copy
from typing import Any

import numpy as np
import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from tests.rules.core.runs import (
    BEGIN,
    RULES,
    Attempt,
    Change,
    Played,
    acting,
    core,
    default_pack,
    dirty,
    not_a_number,
    only,
    plan_in,
    shifted,
    spike,
    substituted,
    under,
)
from trainwarden.record import Event, Step
from trainwarden.rules.core.block import from_steps
from trainwarden.rules.core.feed import dump, load
from trainwarden.rules.core.inputs import Happened, Steps
from trainwarden.rules.core.language import Evaluator, Pack, load_pack
from trainwarden.rules.core.planned import REMEMBERED, Announced, add
from trainwarden.rules.core.settings import PlannedChange, Settings

MIXTURE = Event(kind="mixture", time=BEGIN, step=400, fields={"name": "b"})
JUMP = shifted(401, 0.6)


def lines(attempt: Attempt, *events: Event, after: int | None = None) -> list[Step | Event]:
    """The lines of an attempt, each event behind the record of its step, or all behind the record of ``after``."""
    found: list[Step | Event] = []
    for line in attempt.lines():
        found.append(line)
        if isinstance(line, Step):
            found += [one for one in events if (after or one.step) == line.step]
    numbered = [copy(line) for line in found]
    for seq, line in enumerate(numbered, start=1):
        line.seq = seq
    return numbered


def play(played: Played, who: Any, items: Sequence[Step | Event], sizes: Sequence[int] = (1,), rank: int = 0) -> Played:
    held: list[Step] = []
    count = 0
    for line in [*items, None]:
        if held and (not isinstance(line, Step) or len(held) >= sizes[count % len(sizes)]):
            played.take(Steps(who, rank, tuple(held)))
            held, count = [], count + 1
        if isinstance(line, Step):
            held.append(line)
        elif line is not None:
            played.take(Happened(who, rank, line))
    return played


def told(played: Played) -> list[dict[str, Any]]:
    return [one for one in played.incidents if one["severity"] != "info"]


def notices(played: Played) -> dict[int, str]:
    return {one["step"]: one["says"] for one in played.notices if one["kind"] == "planned_change"}


def run(*events: Event, changes: Sequence[Change] = (JUMP,), after: int | None = None, **others: Any) -> Played:
    attempt = Attempt(last=900, changes=changes, end=None)
    return play(core(**others), attempt.who, lines(attempt, *events, after=after), sizes=(64,))


def test_a_jump_is_told_without_an_event_and_said_with_one() -> None:
    assert told(run())
    played = run(MIXTURE)
    assert played.incidents == []
    assert list(notices(played)) == [400]


@settings(max_examples=6, deadline=None, phases=[Phase.explicit, Phase.reuse, Phase.generate])
@given(sizes=st.lists(st.integers(2, 130), min_size=3, max_size=8), stored=st.integers(380, 560))
def test_any_cut_and_a_restart_anywhere_give_the_same(sizes: list[int], stored: int) -> None:
    changes = [JUMP, spike({430: 3.0, 431: 3.0, 432: 3.0, 433: 3.0, 700: 3.0, 701: 3.0, 702: 3.0})]
    attempt = Attempt(last=800, changes=changes, end=None)
    items = lines(attempt, MIXTURE, Event(kind="batch_size", time=BEGIN, step=640, fields={"samples": 64}))
    whole = play(core(default_pack()), attempt.who, items, sizes=(64,))
    assert len(told(whole)) == 1  # the spike of step 430 lies in the burn-in, that of step 700 does not
    place = next(place for place, line in enumerate(items) if isinstance(line, Step) and line.step == stored)
    other = play(core(default_pack()), attempt.who, items[:place], sizes)
    other.state = load(dump(other.state), Settings(), default_pack())
    play(other, attempt.who, items[place:], sizes)
    assert other.incidents == whole.incidents
    assert notices(other) == notices(whole)


@pytest.mark.parametrize("told_by", [(0,), (1,), (0, 1), (1, 1, 0)])
@pytest.mark.parametrize("ahead", [0, 40])
def test_whichever_rank_tells_it_how_often_and_how_far_ahead_of_the_others_is_the_same(
    told_by: tuple[int, ...], ahead: int
) -> None:
    attempt = Attempt(last=700, changes=[JUMP], end=None, world_size=2)
    streams = [lines(attempt, *[MIXTURE] * told_by.count(rank)) for rank in (0, 1)]
    played = core()
    one, other = (list(stream) for stream in streams)
    for line in one[:ahead]:
        play(played, attempt.who, [line])
    for mine, theirs in zip(one[ahead:], other, strict=False):
        play(played, attempt.who, [theirs], rank=1)
        play(played, attempt.who, [mine])
    assert played.incidents == []
    assert notices(played) == notices(run(MIXTURE)) or list(notices(played)) == [400]


def test_what_is_announced_ahead_begins_at_its_step() -> None:
    assert notices(run(MIXTURE, after=120)) == notices(run(MIXTURE))
    early = run(MIXTURE, after=120, changes=[JUMP, spike({380: 3.0, 381: 3.0, 382: 3.0, 383: 3.0})])
    assert only(told(early))["onset_step"] == 380


def test_news_that_come_late_dismiss_what_is_open_and_only_that() -> None:
    played = run(MIXTURE, after=430)
    late = only(told(played))
    assert (late["onset_step"], late["state"], late["closed_step"]) == (401, "dismissed", 431)
    assert late["cause"]["name"] == "planned_change"
    broken = run(MIXTURE, after=430, changes=[JUMP, not_a_number(420)])
    assert [one["verdict"] for one in told(broken)] == ["nonfinite"]
    assert only(told(broken))["state"] not in ("dismissed", "inconclusive")


def test_a_value_that_is_not_finite_pages_in_the_burn_in_and_a_rollback_waits_for_a_person() -> None:
    attempt = Attempt(last=520, changes=[not_a_number(410)], end=None)
    played = play(acting(), attempt.who, lines(attempt, MIXTURE))
    page = only(told(played))
    assert (page["severity"], page["verdict"], page["onset_step"]) == ("critical", "nonfinite", 410)
    assert page["cause"]["name"] == "planned_change"
    assert page["held_by"] == "approval"


def test_a_rule_may_say_that_it_holds_through_planned_changes() -> None:
    limit = """
      - alert: Ceiling
        expr: loss > 5
        labels: {severity: critical, verdict: divergence, through_planned_changes: "true"}
"""
    peak = [spike({410: 4.0})]

    def judged(pack: Pack) -> list[dict[str, Any]]:
        attempt = Attempt(last=520, changes=peak, end=None)
        return told(play(core(pack), attempt.who, lines(attempt, MIXTURE)))

    assert judged(load_pack(RULES + limit, "r.yml"))[0]["alerts"] == ["Ceiling"]
    assert judged(load_pack(RULES + limit.replace('"true"', '"false"'), "r.yml")) == []


def test_a_word_of_ones_own_is_planned_if_it_says_so_and_a_known_one_is_not_if_it_denies() -> None:
    assert told(run(Event(kind="curriculum", time=BEGIN, step=400)))
    assert not told(run(Event(kind="curriculum", time=BEGIN, step=400, fields={"planned": True})))
    assert told(run(Event(kind="mixture", time=BEGIN, step=400, fields={"planned": False})))
    assert told(run(Event(kind="batch_size", time=BEGIN, step=400)))
    assert not told(run(Event(kind="batch_size", time=BEGIN, step=400, fields={"planned": True})))


def test_an_event_says_itself_how_long_it_settles() -> None:
    slow = [spike(dict.fromkeys(range(560, 570), 3.0))]
    assert told(run(MIXTURE, changes=slow))
    longer = Event(kind="mixture", time=BEGIN, step=400, fields={"settle_steps": 300})
    assert not told(run(longer, changes=slow))
    assert not told(run(MIXTURE, changes=slow, settle_steps=300))
    assert told(run(replace_fields(MIXTURE, settle_steps=0), changes=[spike(dict.fromkeys(range(440, 450), 3.0))]))


def replace_fields(event: Event, **fields: Any) -> Event:
    return Event(kind=event.kind, time=event.time, step=event.step, fields={**event.fields, **fields})


def test_a_stage_that_is_said_again_in_the_same_words_has_not_changed() -> None:
    stage = Event(kind="stage", time=BEGIN, step=50, fields={"name": "a"})
    again = Event(kind="stage", time=BEGIN, step=400, fields={"name": "a"})
    other = Event(kind="stage", time=BEGIN, step=400, fields={"name": "b"})
    assert told(run(stage, again))
    assert not told(run(stage, other))


def test_what_is_said_before_the_first_step_changes_nothing() -> None:
    first = Event(kind="stage", time=BEGIN, step=0, fields={"name": "a"})
    attempt = Attempt(last=120, changes=[spike({40: 8.0, 41: 8.0, 42: 8.0, 43: 8.0})], end=None)
    head, *rest = lines(attempt)
    played = play(core(), attempt.who, [head])
    played.take(Happened(attempt.who, 0, first))
    play(played, attempt.who, rest)
    assert told(played)
    assert notices(played) == {}


@pytest.mark.parametrize(("resumed", "excused"), [(399, False), (400, True), (450, True), (620, False)])
def test_a_resumed_attempt_inherits_what_was_planned_before_the_checkpoint(resumed: int, excused: bool) -> None:
    attempt = Attempt(last=700, end="signal")
    played = play(core(), attempt.who, lines(attempt, MIXTURE), sizes=(50,))
    bump = spike(dict.fromkeys(range(resumed + 20, resumed + 26), 3.0))
    source = {"attempt": 0, "step": resumed, "path": "ckpt"}
    again = Attempt(
        number=1,
        first=resumed + 1,
        last=900,
        changes=[bump],
        start={"resumed_from": source},
        began=BEGIN + 1e4,
        end=None,
    )
    play(played, again.who, lines(again), sizes=(50,))
    assert bool(told(played)) is not excused


@pytest.mark.parametrize("resumed", [350, 450])
def test_a_change_is_said_once_a_run_also_where_it_comes_again_after_a_resume(resumed: int) -> None:
    attempt = Attempt(last=700, changes=[JUMP], end="signal")
    entry = PlannedChange(step=401, kind="mixture")
    played = play(core(planned_changes=(entry,)), attempt.who, lines(attempt))
    assert "The loss was" in notices(played)[400]
    source = {"attempt": 0, "step": resumed, "path": "ckpt"}
    start = {"resumed_from": source}
    again = Attempt(number=1, first=resumed + 1, last=900, changes=[JUMP], start=start, began=BEGIN + 1e4, end=None)
    play(played, again.who, lines(again))
    assert {one["attempt"] for one in played.notices if one["kind"] == "planned_change"} == {0}


def test_a_planned_change_of_the_batch_size_excuses_all_where_it_says_so() -> None:
    attempt = Attempt(last=700, changes=[JUMP], end=None)
    for everything in (False, True):
        entry = PlannedChange(step=401, kind="batch_size", planned=everything)
        played = play(core(planned_changes=(entry,)), attempt.who, lines(attempt))
        assert bool(told(played)) is not everything


def test_a_resumed_attempt_is_not_held_against_its_parent_before_the_change() -> None:
    short = replace_fields(MIXTURE, settle_steps=20)
    attempt = Attempt(last=450, changes=[shifted(401, -0.6)], end="signal")
    played = play(core(), attempt.who, lines(attempt, short), sizes=(50,))
    source = {"attempt": 0, "step": 450, "path": "ckpt"}
    changes = [shifted(451, -0.6), spike(dict.fromkeys(range(530, 536), 0.5))]
    again = Attempt(
        number=1, first=451, last=700, changes=changes, start={"resumed_from": source}, began=BEGIN + 1e4, end=None
    )
    play(played, again.who, lines(again), sizes=(50,))
    found = only(told(played))
    assert found["onset_step"] == 530
    assert found["verdict"] == "transient_spike"


def test_a_healed_rollback_is_not_called_not_recovered_where_the_mixture_changes_as_planned() -> None:
    def rolled_back(*events: Event) -> dict[str, Any]:
        played = acting()
        attempt = Attempt(changes=[dirty(351, 400)], end="signal")
        played.play(attempt, live=True, upto=372)
        plan = plan_in(played.incidents[0])
        assert plan.target is not None
        first = plan.target.step + 1
        changes = [substituted(plan), shifted(421, 0.3)]
        again = Attempt(number=1, first=first, last=900, changes=changes, start=under(plan), began=BEGIN + 1e4)
        play(played, again.who, lines(again, *events), sizes=(7,))
        return played.incidents[0]

    assert rolled_back()["state"] == "not_recovered"
    mixed = rolled_back(Event(kind="mixture", time=BEGIN, step=420, fields={"name": "b"}))
    assert mixed["state"] == "inconclusive"
    assert "planned change of mixture" in mixed["timeline"][-1]["says"]


def test_an_incident_that_is_open_when_the_change_comes_is_closed_or_waits_for_its_person() -> None:
    noisy = spike(dict.fromkeys(range(390, 400), 3.0))
    warned = told(run(MIXTURE, changes=[noisy, JUMP]))[0]
    assert (warned["state"], warned["closed_step"]) == ("inconclusive", 401)

    attempt = Attempt(changes=[dirty(351, 400)], last=600, end=None)
    event = Event(kind="mixture", time=BEGIN, step=380, fields={"name": "b"})
    played = play(acting(mode="approve"), attempt.who, lines(attempt, event))
    waiting = told(played)[0]
    assert (waiting["state"], waiting["held_by"]) == ("awaiting_approval", "approval")
    assert waiting["plan"] is not None


def test_the_configuration_may_learn_of_a_change_while_the_run_is_on() -> None:
    attempt = Attempt(last=900, changes=[JUMP], end=None)
    items = lines(attempt)
    played = play(core(), attempt.who, items[:300], sizes=(50,))
    entry = PlannedChange(step=401, kind="mixture", run="de?o")
    played.state = load(dump(played.state), Settings(planned_changes=(entry,)), load_pack(RULES, "test.yml"))
    play(played, attempt.who, items[300:350], sizes=(50,))
    gone = load(dump(played.state), Settings(), load_pack(RULES, "test.yml"))
    play(played, attempt.who, items[350:], sizes=(50,))
    assert told(played) == []
    assert told(play(Played(gone), attempt.who, items[350:], sizes=(50,)))


def test_a_run_that_begins_behind_a_planned_change_hears_nothing_of_it() -> None:
    entry = PlannedChange(step=100, kind="mixture")
    attempt = Attempt(first=401, last=500, end=None)
    played = play(core(planned_changes=(entry,)), attempt.who, lines(attempt))
    assert notices(played) == {}


@pytest.mark.parametrize(
    "fields", [{"settle_steps": "x"}, {"settle_steps": -3}, {"settle_steps": math.nan}, {"a": [1] * 999}]
)
def test_what_a_peer_writes_into_an_event_breaks_nothing(fields: dict[str, Any]) -> None:
    played = run(Event(kind="mixture", time=BEGIN, step=400, fields=fields), Event(kind="stage", time=BEGIN, step=None))
    assert len(notices(played)[400]) < 600


def test_a_million_announcements_are_bounded() -> None:
    changes: list[Announced] = []
    for step in range(1, 1000):
        add(changes, Announced("stage", step, 10, step, True), step)
    assert len(changes) == REMEMBERED
    assert changes[-1].step == 999


@pytest.mark.parametrize("order", [1, -1])
def test_of_a_long_schedule_that_is_told_ahead_what_comes_next_is_remembered(order: int) -> None:
    changes: list[Announced] = []
    for step in list(range(100, 20_100, 100))[::order]:
        add(changes, Announced("stage", step, 50, -1, True), 10_000)
    assert [one.step for one in changes] == list(range(10_000, 10_000 + 100 * REMEMBERED, 100))


def test_a_flood_of_announcements_far_ahead_takes_no_place_from_those_that_come() -> None:
    flood = [Event(kind="stage", time=BEGIN, step=10**9 + n, fields={"name": str(n)}) for n in range(200)]
    assert list(notices(run(MIXTURE, *flood, after=300))) == [400]


def test_all_that_the_configuration_plans_is_remembered_however_much_it_is() -> None:
    planned = [PlannedChange(step=step, kind="stage", settle_steps=10) for step in range(401, 20_401, 20)]
    played = run(planned_changes=tuple(planned))
    assert list(notices(played))[:2] == [400, 420]


def test_rules_begin_anew_as_at_a_new_start_and_the_others_go_on() -> None:
    pack = default_pack()
    chance = np.random.default_rng(0)

    def block(first: int, last: int) -> Any:
        return from_steps(
            [
                Step(
                    seq=step,
                    step=step,
                    time=float(step),
                    signals={"loss": 2 + 0.1 * float(chance.normal()), "grad_norm": 1 + 0.1 * float(chance.normal())},
                )
                for step in range(first, last)
            ]
        )

    before, behind = block(1, 700), block(700, 1200)
    untouched, anew, new = Evaluator(pack), Evaluator(pack), Evaluator(pack)
    untouched.feed(before)
    anew.feed(before)
    kept = "TrainingNormGrowth"
    anew.begin_anew(set(pack.rules) - {kept})
    for one in (untouched, anew, new):
        one.feed(behind)
    nodes = {node.key: number for number, node in enumerate(pack.program.nodes)}
    names = list(pack.rules)
    keeping = {pack.program.nodes[n].key for n in pack.program.below(pack.program.outputs[names.index(kept)])}
    for key in nodes:
        ours, theirs = anew.dump()["nodes"].get(key), (untouched if key in keeping else new).dump()["nodes"].get(key)
        if key in keeping or pack.program.nodes[nodes[key]].inputs:
            assert ours == theirs, key


def test_a_rule_knows_what_it_reads() -> None:
    engine = Evaluator(default_pack())
    assert engine.reads("TrainingLossLevelShift") == {"loss"}
    assert engine.reads("TrainingGradCollapse") == {"loss", "grad_norm"}
    assert engine.reads("TrainingUpdateCollapse") == {"update_ratio", "lr", "moment_rms"}
    assert engine.reads("Nobody") == frozenset()
