"""What a pack holds, and how an evaluator goes on with it."""

from __future__ import annotations

import msgspec
import pytest

from tests.rules.language.streams import block, column, pack_of, record, run, said
from trainwarden.rules.core.alerts import Hold
from trainwarden.rules.core.language import Evaluator, load_pack, load_packs

TEXT = """
signals: {temperature: [], load: [expert]}
groups:
  - name: g
    rules:
      - record: ratio
        expr: loss / ema(loss)
      - record: high
        expr: ratio > 1.5
      - alert: Hot
        expr: temperature > 90 or spread(load by expert) > 5   # a comment
        for: 2 records
        keep_firing_for: 5m
        labels: {severity: info}
        annotations: {summary: "{{ value }}"}
      - alert: Spike
        expr: high and not ratio > 9
"""


def test_a_pack_holds_its_rules_as_they_stand_in_the_file() -> None:
    pack = load_pack(TEXT, "my.yml")
    assert list(pack.rules) == ["Hot", "Spike"]
    hot = pack.rules["Hot"]
    assert (hot.expr, hot.group, hot.source, hot.line) == (
        "temperature > 90 or spread(load by expert) > 5",
        "g",
        "my.yml",
        10,
    )
    assert (hot.for_, hot.keep_firing_for) == (Hold(2, "records"), Hold(300, "seconds"))
    assert (dict(hot.labels), dict(hot.annotations)) == ({"severity": "info"}, {"summary": "{{ value }}"})
    assert dict(pack.records) == {"ratio": "loss / ema(loss)", "high": "ratio > 1.5"}
    with pytest.raises(TypeError):
        pack.rules["x"] = hot  # type: ignore[index]
    with pytest.raises(AttributeError):
        hot.expr = "x"  # type: ignore[misc]


def test_own_signals_and_recorded_expressions_are_used_like_signals() -> None:
    pack = load_pack(TEXT, "my.yml")
    steps = [record(1, loss=1.0, load={"0": 1.0, "1": 9.0}), record(2, loss=3.0, temperature=95.0)]
    changes = said(run(pack, steps))[:2]
    assert changes == [("Hot", "pending", 1, 1), ("Hot", "firing", 2, 1)]


def test_equal_expressions_are_computed_once() -> None:
    one = pack_of("loss / ema(loss, beta=0.98) > 1.5")
    three = pack_of(
        "loss / ema(loss, beta=0.98) > 1.5", "loss / ema(loss) > 1.5", "not (loss / ema(loss, 0.98)) <= 1.5"
    )
    assert len(one.program.nodes) == len(three.program.nodes)


def test_windows_of_one_expression_share_one_history() -> None:
    pack = pack_of("mean(loss[10]) > median(loss[200] offset 20)", "min(loss[10]) > 1")
    pasts = [node for node in pack.program.nodes if node.name == "past"]
    assert [node.parameters for node in pasts] == [(("span", 220),)]
    assert len([node for node in pack.program.nodes if node.name == "window"]) == 2


def test_recorded_expressions_that_no_alert_needs_cost_nothing() -> None:
    text = "groups: [{name: g, rules: [{record: r, expr: 'mean(loss[99])'}, {alert: a, expr: loss > 1}]}]"
    assert [node.name for node in load_pack(text, "f").program.nodes] == ["signal", "number", ">"]


def test_records_built_on_records_stay_small() -> None:
    rules = ["{record: r0, expr: loss * 1}"]
    rules += [f"{{record: r{n}, expr: r{n - 1} + r{n - 1}}}" for n in range(1, 60)]
    text = f"groups: [{{name: g, rules: [{', '.join(rules)}, {{alert: a, expr: r59 > 1}}]}}]"
    pack = load_pack(text, "f")
    assert len(pack.program.nodes) < 70
    assert max(len(node.key) for node in pack.program.nodes) < 200


def test_a_state_goes_on_under_an_edited_pack_where_expressions_are_still_in_it() -> None:
    steps = column([1.0] * 50)
    before = Evaluator(pack_of("x > mean(x[100])", "x > 0"))
    before.feed(block(steps))
    after = Evaluator.load(pack_of("x < mean(x[100]) + 1", "x > 0"), before.dump())
    changes = after.feed(block(column([1.0], first=51)))
    assert [(change.rule, change.state) for change in changes] == [
        ("r0", "firing")
    ]  # its window was full, r1 fired before


def test_a_state_of_another_format_is_refused() -> None:
    with pytest.raises(ValueError, match="schema 7, not 1"):
        Evaluator.load(pack_of("x > 1"), {"schema": 7})


def test_a_state_is_the_same_through_json_and_msgpack() -> None:
    pack = pack_of("x > mean(x[9])", "zscore(x) > 3", "x / ema(x) > 2")
    evaluator = Evaluator(pack)
    evaluator.feed(block(column([1.0, float("nan"), 3.0, None, float("inf")])))
    state = evaluator.dump()
    assert msgspec.json.decode(msgspec.json.encode(state)) == state
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(state)) == state
    assert Evaluator.load(pack, state).dump() == state


def test_steps_must_grow() -> None:
    evaluator = Evaluator(pack_of("x > 1"))
    evaluator.feed(block(column([1.0, 2.0])))
    for steps in (column([1.0], first=2), [record(5, x=1.0), record(5, x=1.0)]):
        with pytest.raises(ValueError, match="steps must grow"):
            evaluator.feed(block(steps))
    assert evaluator.feed(block([])) == []


def test_files_keep_their_own_names_for_records() -> None:
    one = "groups: [{name: g, rules: [{record: r, expr: loss * 1}, {alert: a, expr: r > 1}]}]"
    two = "groups: [{name: g, rules: [{record: r, expr: loss * 2}, {alert: b, expr: r > 1}]}]"
    pack = load_packs([(one, "one.yml"), (two, "two.yml")])
    assert said(run(pack, [record(1, loss=0.7)])) == [("b", "firing", 1, 1)]
    assert pack.source == "one.yml, two.yml"
