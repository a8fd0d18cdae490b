"""What is remembered of the records, and that it stays bounded."""

from __future__ import annotations

import math

import pytest

from tests.rules.core.runs import Attempt
from trainwarden.record import ShardSpan, Step
from trainwarden.rules.core.lineage import until
from trainwarden.rules.core.trace import Trace


def filled(steps: range, limit: int = 4000) -> Trace:
    trace = Trace(limit=limit)
    for step in steps:
        trace.append(Attempt().record(step, step))
    return trace


def test_absent_nan_and_zero_are_three_things() -> None:
    trace = Trace(limit=100)
    trace.append(Step(seq=1, step=1, time=1.0, signals={"loss": math.nan, "skipped": 0.0}))
    trace.append(Step(seq=2, step=2, time=2.0))
    assert trace.measured("loss").tolist() == [True, False]
    assert trace.measured("skipped").tolist() == [True, False]
    assert trace.measured("never").tolist() == [False, False]
    assert trace.at("skipped", 1) == 0.0
    assert trace.at("skipped", 2) is None
    assert math.isnan(trace.at("loss", 1) or 0.0)


def test_a_signal_that_appears_late_was_absent_before() -> None:
    trace = filled(range(1, 6))
    trace.append(Step(seq=6, step=6, time=3.0, signals={"beta2": 0.95}))
    assert trace.measured("beta2").tolist() == [False] * 5 + [True]


@pytest.mark.parametrize("limit", [100, 250])
def test_the_newest_rows_are_kept_whole_and_no_more(limit: int) -> None:
    trace = filled(range(1, 1001), limit)
    whole = filled(range(1, 1001))
    assert limit <= len(trace) <= 1.25 * limit
    for step in (1000, 1000 - limit + 1):
        row, same = trace.row(step), whole.row(step)
        assert trace.samples(row) == whole.samples(same)
        assert trace.shards(row) == whole.shards(same)
        assert trace.at("loss", step) == whole.at("loss", step)
    assert len(trace.spans) <= limit // 50 + 2
    assert trace.at("loss", 1) is None


def test_several_ranges_and_shards_of_a_step_are_kept() -> None:
    trace = Trace(limit=100)
    spans = [ShardSpan("a", 0, 10), ShardSpan("b", 10, 30)]
    trace.append(Step(seq=1, step=1, time=1.0, samples=[(20, 22), (3, 5), (5, 6)], shards=spans))
    trace.append(Step(seq=2, step=2, time=1.0))
    assert trace.samples(0) == [(3, 6), (20, 22)]
    assert trace.shards(0) == spans
    assert (trace.samples(1), trace.shards(1)) == ([], [])


def test_what_a_start_inherits_ends_at_the_checkpoint_and_is_a_copy() -> None:
    parent = filled(range(1, 401))
    inherited = until(parent, 300)
    assert (len(inherited), int(inherited.steps[-1])) == (300, 300)
    inherited.values["loss"][:] = 0.0
    assert parent.at("loss", 300) != 0.0
    inherited.append(Attempt().record(301, 1))
    assert inherited.at("loss", 301) is not None
    assert len(until(parent, 300, rows=50)) == 50


def test_cadence_stride_and_interval_are_the_usual_ones() -> None:
    trace = filled(range(1, 101))
    assert (trace.cadence("optimizer_step"), trace.cadence("loss"), trace.stride()) == (10, 1, 1)
    assert trace.interval() == 0.5
    assert Trace(limit=10).interval() is None
