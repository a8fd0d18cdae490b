"""A signal that goes on in another unit within one start, and what only looks like it."""

from __future__ import annotations

import math
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.rules.core.runs import Attempt, core, default_pack
from trainwarden.record import Event, Step
from trainwarden.rules.core.block import from_steps
from trainwarden.rules.core.feed import dump, load
from trainwarden.rules.core.inputs import Happened, Start, Steps
from trainwarden.rules.core.instrument_rescale import LIMIT, Ruling, Scale, follow
from trainwarden.rules.core.rescaling import look_at_units
from trainwarden.rules.core.settings import Settings
from trainwarden.rules.core.state import Alive
from trainwarden.rules.core.stream import Line
from trainwarden.rules.core.trace import Trace

AT = 1000


def losses(factor: float, seed: int = 0, noise: float = 0.01, afterwards: float | None = None) -> Any:
    chance = np.random.default_rng(seed)
    spread = np.where(np.arange(1400) < AT, noise, noise if afterwards is None else afterwards)
    level = 2.1 * (1 - 2e-5 * np.arange(1400))
    return level * np.where(np.arange(1400) < AT, 1.0, factor) * (1 + spread * chance.normal(size=1400))


def norms(factor: float, seed: int = 1) -> Any:
    chance = np.random.default_rng(seed)
    return 0.5 * np.exp(0.15 * chance.normal(size=1400)) * np.where(np.arange(1400) < AT, 1.0, factor)


NONE = np.full(1400, np.nan)


def believed(values: Any, others: Any = NONE, roots: bool = False) -> list[Ruling]:
    return [one for one in follow(Scale(), values, others, roots) if one.kind == "believed"]


@pytest.mark.parametrize("noise", [0.002, 0.01, 0.02])
@pytest.mark.parametrize("factor", [2.0, 8.0, 3.0, 1 / 32])
def test_an_exact_multiple_is_believed_within_the_limit_at_the_record_where_it_began(
    factor: float, noise: float
) -> None:
    (ruling,) = believed(losses(factor, noise=noise))
    assert ruling.factor == pytest.approx(factor)
    assert ruling.row + 1 - ruling.records == AT
    assert ruling.records <= LIMIT


@pytest.mark.parametrize("beside", [1.0, 8.0, math.sqrt(8)])
def test_the_gradient_norm_may_stay_or_move_by_the_same_or_its_root(beside: float) -> None:
    (ruling,) = believed(losses(8.0), norms(beside))
    assert ruling.other == pytest.approx(beside)


@pytest.mark.parametrize("beside", [1.6, 5.0, 20.0])
def test_a_gradient_norm_that_moves_by_something_else_tells_of_a_fault(beside: float) -> None:
    assert believed(losses(8.0), norms(beside)) == []


@pytest.mark.parametrize("factor", [1.3, 1.7, 1.9, 2.1, 2.3, 5.0, 7.5])
@pytest.mark.parametrize("noise", [0.005, 0.02])
def test_another_factor_is_no_change_of_unit(factor: float, noise: float) -> None:
    assert believed(losses(factor, noise=noise)) == []


@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize("factor", [math.sqrt(2), 2.0, 8.0])
def test_an_exact_factor_with_another_noise_is_none(factor: float, seed: int) -> None:
    assert believed(losses(factor, seed, noise=0.01, afterwards=0.02)) == []
    assert believed(losses(factor, seed, noise=0.01, afterwards=0.01 / factor**1.5)) == []


def test_a_loss_that_doubles_and_goes_on_rising_is_none() -> None:
    values = losses(2.0)
    values[AT:] *= 1 + 1e-3 * np.arange(400)
    assert believed(values) == []


def test_a_spike_of_exactly_twice_the_loss_that_decays_is_none() -> None:
    values = losses(1.0)
    values[AT : AT + 60] *= 1 + np.exp(-np.arange(60) / 10)
    assert believed(values) == []


def test_a_root_is_a_unit_of_norms_and_one_of_a_loss_only_if_its_norm_moved_with_it() -> None:
    root = math.sqrt(8)
    assert believed(losses(root)) == []
    assert believed(losses(root), norms(1.0)) == []
    assert believed(losses(root), norms(root))[0].factor == pytest.approx(root)
    assert believed(losses(root), NONE, roots=True)[0].factor == pytest.approx(root)


def test_a_second_change_is_seen_too() -> None:
    values = losses(8.0)
    values[1250:] /= 8
    assert [one.factor for one in believed(values)] == pytest.approx([8.0, 1 / 8])


@settings(max_examples=30, deadline=None)
@given(cuts=st.lists(st.integers(0, 1400), max_size=12), factor=st.sampled_from([1.0, 1.9, 2.0, 8.0]))
def test_any_cut_gives_the_same_rulings(cuts: list[int], factor: float) -> None:
    values, others = losses(factor), norms(factor)
    values[[50, 700, 1010]] = np.nan
    values[[300, AT - 1, 1350]] = 30.0
    scale, found = Scale(), []
    for first, end in pairwise([0, *sorted(cuts), 1400]):
        for one in follow(scale, values[first:end], others[first:end], False):
            found.append(Ruling(first + one.row, one.kind, one.factor, one.other, one.records))
    assert found == follow(Scale(), values, others, False)


# Through the whole core.


def rescaled(step: int, signals: dict[str, Any]) -> None:
    if step > 400:
        signals["loss"] *= 8.0
        signals["grad_norm"]["all"] *= 8.0
    if step in (650, 651, 652):
        signals["loss"] *= 2.2


RESCALED = Attempt(last=700, changes=[rescaled])


def played(sizes: list[int], restart: int | None = None) -> Any:
    run = core(pack=default_pack())
    held: list[Step] = []
    cuts = iter(sizes * 800)
    size = next(cuts)
    for number, line in enumerate(RESCALED.lines()):
        if isinstance(line, Event) or len(held) >= size:
            if held:
                run.take(Steps(RESCALED.who, 0, tuple(held)))
            held, size = [], next(cuts)
        if restart is not None and number >= restart:
            run.state = load(dump(run.state), Settings(), default_pack())
            restart = None
        if isinstance(line, Event):
            run.take(Happened(RESCALED.who, 0, line))
        else:
            held.append(line)
    return run


@pytest.fixture(scope="module")
def whole() -> Any:
    return played([5000])


def test_it_is_said_once_for_each_signal_and_what_opened_on_it_is_the_instrument(whole: Any) -> None:
    said = [(one["kind"], one["signal"], one["step"]) for one in whole.notices if one["kind"] == "logging_scale_change"]
    assert said == [("logging_scale_change", "loss", 401), ("logging_scale_change", "grad_norm", 401)]
    first = whole.incidents[0]
    assert (first["state"], first["severity"], first["cause"]["name"]) == ("inconclusive", "info", "instrument")


def test_behind_it_the_rules_see_again_and_the_trend_spans_the_change(whole: Any) -> None:
    spike = whole.incidents[-1]
    assert spike["onset_step"] == 650
    assert spike["severity"] == "warning"
    assert spike["state"] == "recovered"


@settings(max_examples=8, deadline=None)
@given(sizes=st.lists(st.integers(1, 120), min_size=2, max_size=8), restart=st.integers(380, 470))
def test_any_cut_and_a_restart_at_any_record_give_the_same(sizes: list[int], restart: int, whole: Any) -> None:
    run = played(sizes, restart)
    assert run.incidents == whole.incidents
    assert run.notices == whole.notices


def test_a_candidate_stays_open_over_records_that_lack_its_signal() -> None:
    chance = np.random.default_rng(5)
    records = [
        Step(seq=0, step=step, time=float(step), signals={"loss": 2 + 0.02 * chance.normal()}) for step in range(1, 311)
    ]
    for record in records:
        if record.step <= 305 and record.step != 304:
            record.signals["grad_norm"] = {"all": (1 + 0.02 * chance.normal()) * (2 if record.step > 300 else 1)}
    for sizes in ((310,), (303, 1, 1, 5)):
        alive = Alive(Start("uid", "run", 0, "s0"), Line(), Trace(limit=100))
        held, first = [], 0
        for size in sizes:
            looked = look_at_units(alive, from_steps(records[first : first + size]))
            held += [False] * size if looked.held is None else looked.held.tolist()
            first += size
        assert held == [False] * 300 + [True] * 10


@pytest.mark.parametrize("chunk", [1, 13, 400])
def test_a_resumed_start_is_compared_with_its_parent_in_the_new_unit(chunk: int) -> None:
    def halved(step: int, signals: dict[str, Any]) -> None:
        if step > 440:
            signals["loss"] /= 4.0

    run = core(pack=default_pack())
    run.play(Attempt(last=500), chunk=500)
    resumed = {"attempt": 0, "step": 400, "path": "ckpt/0/400"}
    run.play(
        Attempt(number=1, first=401, last=800, changes=[halved], start={"resumed_from": resumed}, began=2e9),
        chunk=chunk,
    )
    assert [one for one in run.incidents if one["severity"] == "critical"] == []
    assert [one["state"] for one in run.incidents if "TrainingResumeLevel" in one["alerts"]] == ["recovered"]
    assert all(one["closed_step"] < 600 for one in run.incidents)
    said = [(one["signal"], one["step"]) for one in run.notices if one["kind"] == "logging_scale_change"]
    assert said == [("loss", 441)]
