"""parent, at_resume, since_resume and departure: the attempt before, beside the records of this one."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.rules.language.streams import pack_of, record, same
from trainwarden.record import Step
from trainwarden.rules.core.alerts import AlertChange
from trainwarden.rules.core.block import Parent, from_steps
from trainwarden.rules.core.language import Evaluator, Pack
from trainwarden.rules.core.language.errors import ExpressionError
from trainwarden.rules.evaluate import Compiler, evaluate


def line(first: int, last: int, stride: int = 1, seed: int = 0, level: float = 2.0) -> list[Step]:
    rng = np.random.default_rng(seed)
    return [
        record(
            step,
            stride,
            loss=level + 3 * step**-0.4 + 0.05 * float(rng.normal()),
            lr={"all": 1e-3 * step},
            **({"optimizer_step": float(step)} if step % 10 == 0 else {}),
        )
        for step in range(first, last + 1, stride)
    ]


def parent(steps: Sequence[Step], resumed_from: int) -> Parent:
    return Parent(from_steps(steps), resumed_from, 340)


def values(text: str, steps: Sequence[Step], of: Parent | None) -> list[Any]:
    block = replace(from_steps(steps), parent=of)
    (found,) = evaluate(Compiler().compile(text), block)
    return [value if known else None for value, known in zip(found.values.tolist(), found.known.tolist(), strict=True)]


BEFORE = parent(line(1, 130), 100)
AFTER = line(101, 400, seed=1)


def test_the_parents_value_is_that_of_the_same_step_as_far_as_it_came() -> None:
    found = values("parent(loss)", AFTER, BEFORE)
    assert found[:30] == [one.signals["loss"] for one in line(1, 130)[100:130]]
    assert found[30:] == [None] * 270


def test_at_the_resume_it_is_the_newest_value_up_to_there_for_a_while() -> None:
    assert values("at_resume(lr)", AFTER, BEFORE) == [0.1] * 20 + [None] * 280
    assert values("at_resume(optimizer_step, within=3)", AFTER, BEFORE)[:4] == [100.0] * 3 + [None]
    assert values("at_resume(max(lr[50] offset 10), within=1)", AFTER, BEFORE)[0] == pytest.approx(0.09)
    assert values("at_resume(slope(lr[50]))", AFTER, BEFORE)[0] == pytest.approx(1e-3)


def test_an_offset_counts_records_where_one_covers_several_steps() -> None:
    before = parent(line(10, 1000, 10), 1000)
    found = values("at_resume(lr, within=5)", line(1010, 1200, 10), before)
    assert [value is not None for value in found[:6]] == [True] * 5 + [False]


def test_steps_since_the_resume_begin_at_one() -> None:
    found = values("since_resume()", AFTER, BEFORE)
    assert found[:3] == [1.0, 2.0, 3.0]
    assert found[238:242] == [239.0, 240.0, None, None]


def test_without_a_parent_all_is_unknown() -> None:
    for text in ("parent(loss)", "at_resume(lr)", "since_resume()", "departure(loss)"):
        assert set(values(text, AFTER, None)) == {None}
    assert set(values("resumed()", AFTER, None)) == {False}
    assert values("resumed()", AFTER, BEFORE) == [True] * 240 + [False] * 60


def test_a_signal_that_the_parent_had_not_is_unknown() -> None:
    assert set(values("at_resume(update_ratio)", AFTER, BEFORE)) == {None}
    assert set(values("parent(update_ratio)", AFTER, BEFORE)) == {None}


def test_a_run_that_goes_on_as_before_departs_nowhere() -> None:
    for seed in range(1, 30):
        found = values("departure(loss)", line(101, 400, seed=seed), BEFORE)
        assert found[:4] == [None] * 4
        assert found[200:] == [None] * 100
        known = [value for value in found if value is not None]
        assert max(map(abs, known)) < 0.5


@pytest.mark.parametrize("by", [-0.3, 0.3])
def test_another_level_departs_in_its_direction(by: float) -> None:
    moved = line(101, 400, seed=1, level=2.0 + by)
    found = values("departure(loss)", moved, BEFORE)
    assert all(1.0 < math.copysign(1, by) * value < 6.5 for value in found[9:40])


def test_a_departure_is_the_mean_of_the_last_values_less_three_errors() -> None:
    from trainwarden.rules.core.resumed import LINE_FROM
    from trainwarden.rules.core.trend import fit

    older = BEFORE.block
    kept = (older.step <= 100) & (older.step >= LINE_FROM * 100)
    trend = fit(older.step[kept], older.columns["loss",].values[kept])
    assert trend is not None
    moved = line(101, 200, seed=1, level=2.5)
    steps = np.array([one.step for one in moved[20:30]])
    losses = np.array([one.signals["loss"] for one in moved[20:30]])
    away = float(np.mean(losses - trend.at(steps)))
    error = math.hypot(trend.noise / math.sqrt(10 / trend.correlation), trend.error(float(np.mean(steps))))
    assert values("departure(loss)", moved, BEFORE)[29] == pytest.approx((away - 3 * error) / trend.noise)


@pytest.mark.parametrize("factor", [8.0, 0.5, math.sqrt(2)])
def test_an_exact_multiple_is_unknown_until_its_unit_is_decided(factor: float) -> None:
    moved = [record(one.step, loss=factor * float(one.signals["loss"])) for one in line(101, 400, seed=1)]  # type: ignore[arg-type]
    found = values("departure(loss)", moved, BEFORE)
    assert found[:20] == [None] * 20
    assert all(abs(value) > 3 for value in found[20:30])


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("parent(activation_rms) > 1", "activation_rms.all of a parent is not remembered"),
        ('parent(grad_norm{group="mlp"}) > 1', "grad_norm.mlp of a parent is not remembered"),
        ("parent(at_resume(lr)) > 1", "no function of the resume"),
        ("parent(idle()) > 1", "are of no record"),
        ("at_resume(spread(loss by rank)) > 1", "no vector"),
        ("at_resume(lr, within=0) > 1", "between 1 and 1000"),
    ],
)
def test_what_cannot_be_asked_of_a_parent_is_an_error(text: str, says: str) -> None:
    with pytest.raises(ExpressionError, match=says):
        Compiler().compile(text)


EXPRESSIONS = (
    "loss > parent(loss) + 0.02",
    "abs(loss - parent(mean(loss[5]))) > 0.05",
    "lr / at_resume(lr, within=30) > 1.1 and since_resume() < 25",
    "loss > at_resume(median(loss[20])) or optimizer_step < at_resume(optimizer_step, within=100)",
    "resumed() and loss > 1.02 * at_resume(min(loss[50]), within=200)",
    "resumed() and loss > 2.3 or since_resume() > 200",
    "departure(loss) > 0.3 or departure(loss, records=5, within=40) < -0.3",
)
PACK = pack_of(*EXPRESSIONS)


def run(pack: Pack, steps: Sequence[Step], of: Parent, cuts: Iterable[int], reload: Iterable[int]) -> list[AlertChange]:
    again = set(reload)
    places = sorted({0, len(steps), *(cut for cut in {*cuts, *again} if 0 < cut < len(steps))})
    evaluator = Evaluator(pack)
    found: list[AlertChange] = []
    for first, end in pairwise(places):
        if first in again:
            evaluator = Evaluator.load(pack, msgspec.json.decode(msgspec.json.encode(evaluator.dump())))
            of = Parent(of.block, of.resumed_from, of.last)  # made anew of what is stored
        block = replace(from_steps(steps[first:end]), parent=of if first < 240 else None)
        found += [replace(change, row=first + change.row) for change in evaluator.feed(block)]
    return found


@settings(max_examples=25)
@given(
    seed=st.integers(0, 1000),
    level=st.sampled_from([1.8, 2.0, 2.1, 2.3]),
    cuts=st.sets(st.integers(0, 300)),
    reload=st.sets(st.integers(0, 300), max_size=5),
)
def test_any_cut_and_any_restart_gives_the_same_alerts(
    seed: int, level: float, cuts: set[int], reload: set[int]
) -> None:
    steps = line(101, 400, seed=seed, level=level)
    whole = run(PACK, steps, BEFORE, (), ())
    assert same(run(PACK, steps, BEFORE, cuts, ()), whole)
    assert same(run(PACK, steps, BEFORE, cuts, reload), whole)


def test_the_streams_make_every_alert_change() -> None:
    seen = {
        change.rule
        for level in (1.8, 2.3)
        for change in run(PACK, line(101, 400, seed=1, level=level), BEFORE, (), ())
        if change.state == "firing"
    }
    assert seen == {f"r{place}" for place in range(len(EXPRESSIONS))}
