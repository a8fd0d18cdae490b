"""The clock: idle() and budget() are told at ticks, and a record ends what they made fire."""

from __future__ import annotations

import msgspec
import pytest

from tests.rules.language.streams import column, record, run, values_of
from trainwarden.record import Step
from trainwarden.rules.core.block import from_steps
from trainwarden.rules.core.language import Evaluator, Pack, RuleErrors, load_pack


def pack_of(expr: str, **more: str) -> Pack:
    lines = ["signals: [x]", "groups:", "  - name: g", "    rules:"]
    lines += ["      - alert: High", "        expr: x > 5", "      - alert: Still", f"        expr: {expr}"]
    lines += [f"        {key}: {value}" for key, value in more.items()]
    return load_pack("\n".join(lines), "clock.yml")


def play(pack: Pack, *inputs: Step | tuple[float, float | None], budget: float = 900.0) -> list[tuple[str, str, int]]:
    """Feed records one by one and ticks as (time, idle); the state goes through JSON before each."""
    engine, step, found = Evaluator(pack), 0, []
    for one in inputs:
        engine = Evaluator.load(pack, msgspec.json.decode(msgspec.json.encode(engine.dump())))
        if isinstance(one, Step):
            step = one.step
            changes = engine.feed(from_steps([one]))
        else:
            changes = engine.tick(one[0], step, one[1], budget)
        found += [(change.rule, change.state, change.since) for change in changes]
    return found


def test_it_fires_at_a_tick_and_the_next_record_ends_it() -> None:
    said = play(pack_of("idle() > budget()"), record(7, x=1.0), (1900.0, 899.0), (1902.0, 901.0), record(8, x=9.0))
    assert said == [("Still", "firing", 7), ("High", "firing", 8), ("Still", "resolved", 7)]


def test_an_idleness_that_nobody_knows_ends_it_as_unknown() -> None:
    said = play(pack_of("idle() > budget()"), record(7, x=1.0), (1900.0, 901.0), (1902.0, None), (1904.0, None))
    assert said == [("Still", "firing", 7), ("Still", "unknown", 7)]


def test_it_holds_in_wall_clock_time() -> None:
    pack = pack_of("idle() > 60 and idle() > budget() / 10", **{"for": "5m"})
    said = play(pack, record(1, x=1.0), (1100.0, 99.0), (1399.0, 398.0), (1400.0, 399.0), record(2, x=1.0))
    assert said == [("Still", "pending", 1), ("Still", "firing", 1), ("Still", "resolved", 1)]


def test_what_is_kept_firing_ends_at_the_same_record_for_any_cut() -> None:
    pack = pack_of("idle() > 60", keep_firing_for="3s")
    steps = column([1.0] * 8, first=2)
    ends = []
    for size in (1, 3, 8):
        engine = Evaluator(pack)
        engine.feed(from_steps([record(1, x=1.0)]))
        assert engine.tick(1000.0, 1, 61.0, 900.0)[0].state == "firing"
        changes = [
            change
            for first in range(0, 8, size)
            for change in engine.feed(from_steps(steps[first : first + size]))
            if change.rule == "Still"
        ]
        ends.append([(change.state, change.step) for change in changes])
    assert ends == [[("resolved", 4)]] * 3


def test_a_record_knows_of_no_clock() -> None:
    assert values_of("idle()", column([1.0, 2.0])) == [None, None]
    assert [one.rule for one in run(pack_of("idle() >= 0"), column([9.0] * 3))] == ["High"]


@pytest.mark.parametrize(
    ("expr", "says"),
    [
        ("idle() > budget() and x > 1", "no signal, window or other function goes with them"),
        ("mean(idle()[100]) > 5", "no signal, window or other function goes with them"),
        ("idle(x) > 5", "idle() takes no argument"),
        ("idle > 5", "idle is a function: write idle(…)"),
    ],
)
def test_steps_and_seconds_do_not_mix(expr: str, says: str) -> None:
    with pytest.raises(RuleErrors) as caught:
        pack_of(expr)
    assert says in str(caught.value)


def test_a_hold_in_steps_would_never_be_met() -> None:
    with pytest.raises(RuleErrors, match="write `for` as a time such as 5m"):
        pack_of("idle() > budget()", **{"for": "3 steps"})
