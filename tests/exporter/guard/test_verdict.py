"""When an update is left out: the decision on the device is that of a plain loop over numbers."""

from __future__ import annotations

import math
import statistics
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from tests.exporter.runs import lines, loss_of, make, watch
from trainwarden.exporter.guard import Guard
from trainwarden.exporter.guard.verdict import Bounds, Verdicts
from trainwarden.record import Step


def judged(verdicts: Verdicts, norms: list[float]) -> list[tuple[float, ...]]:
    """Return the reasons for each norm, in order."""
    return [tuple(verdicts.judge(torch.tensor(norm, dtype=torch.float64), None, None)[0].tolist()) for norm in norms]


def plain(bounds: Bounds, norms: list[float]) -> list[tuple[float, ...]]:
    """The same, with numbers and lists."""
    kept: list[float] = []
    refused, found = 0, []
    for norm in norms:
        finite = math.isfinite(norm)
        over = finite and bounds.limit is not None and norm > bounds.limit
        surge = False
        if bounds.factor is not None and finite and not over and len(kept) >= math.ceil(bounds.window / 2):
            last = kept[-bounds.window :]
            surge = norm > bounds.factor * statistics.median_low(last)
            if surge and refused >= bounds.patience:
                surge, kept = False, []
        if not finite or over or surge:
            refused += surge
        else:
            refused = 0
            kept.append(norm)
        found.append((float(not finite), float(over), float(surge)))
    return found


NORMS = st.one_of(st.floats(0, 1e3), st.sampled_from([1.0, 2.0, 50.0, 1e30, math.nan, math.inf]))


@settings(deadline=None, max_examples=150)
@given(
    norms=st.lists(NORMS, max_size=60),
    limit=st.sampled_from([None, 3.0, 100.0]),
    factor=st.sampled_from([None, 1.5, 10.0]),
    window=st.integers(2, 9),
    patience=st.integers(1, 4),
)
def test_the_decisions_are_those_of_a_plain_loop(
    norms: list[float], limit: float | None, factor: float | None, window: int, patience: int
) -> None:
    bounds = Bounds(limit, factor, window, patience)
    assert judged(Verdicts(bounds), norms) == plain(bounds, norms)


def test_a_surge_is_refused_and_a_new_level_is_let_through_after_patience() -> None:
    verdicts = Verdicts(Bounds(factor=10.0, window=8, patience=3))
    surges = [reasons[2] for reasons in judged(verdicts, [1.0] * 4 + [11.0, 9.0] + [20.0] * 10)]
    assert surges == [0] * 4 + [1, 0] + [1, 1, 1] + [0] * 7


def test_what_is_not_finite_is_never_let_through_and_nor_is_what_a_person_forbade() -> None:
    bounds = Bounds(limit=5.0, factor=2.0, window=4, patience=2)
    assert judged(Verdicts(bounds), [1.0] * 4 + [math.nan] * 20) == [(0, 0, 0)] * 4 + [(1, 0, 0)] * 20
    assert judged(Verdicts(bounds), [1.0] * 4 + [6.0] * 20) == [(0, 0, 0)] * 4 + [(0, 1, 0)] * 20


def test_a_restart_in_the_middle_decides_as_if_there_was_none() -> None:
    bounds = Bounds(factor=5.0, window=6, patience=2)
    norms = [1.0, 1.5, 2.0, 1.0, 30.0, 1.2, 40.0, 50.0, 60.0, 55.0, 70.0, 500.0]
    for cut in range(len(norms)):
        first, second = Verdicts(bounds), Verdicts(bounds)
        found = judged(first, norms[:cut])
        second.load_state_dict(first.state_dict(), torch.device("cpu"))
        assert found + judged(second, norms[cut:]) == plain(bounds, norms)


def test_the_state_of_a_guard_goes_through_a_checkpoint(tmp_path: Path) -> None:
    def guarded(name: str) -> tuple[Any, Any, Any, Guard]:
        model = make()
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
        exporter = watch(model, optimizer, tmp_path, run=name)
        return model, optimizer, exporter, Guard(exporter, factor=10.0, window=8)

    def step(model: nn.Module, optimizer: Any, exporter: Any, number: int, by: float = 1.0) -> None:
        optimizer.zero_grad()
        (loss_of(model, number) * by).backward()
        optimizer.step()
        exporter.step()

    model, optimizer, exporter, guard = guarded("first")
    for number in range(1, 6):
        step(model, optimizer, exporter, number)
    torch.save(guard.state_dict(), tmp_path / "guard.pt")
    exporter.close()
    model, optimizer, exporter, guard = guarded("second")
    guard.load_state_dict(torch.load(tmp_path / "guard.pt"))
    step(model, optimizer, exporter, 6, by=1000.0)
    exporter.close()
    (record,) = [line for line in lines(tmp_path, "second") if isinstance(line, Step)]
    assert record.signals["guard_skipped_steps"] == {"nonfinite": 0, "limit": 0, "surge": 1}
    exporter = watch(model, optimizer, tmp_path, run="third")
    with pytest.raises(ValueError, match="window of 8"):
        Guard(exporter, factor=2.0, window=9).load_state_dict(guard.state_dict())
    exporter.close()


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        ({"limit": 0.0}, "limit"),
        ({"limit": math.nan}, "limit"),
        ({"factor": 1.0}, "factor"),
        ({"factor": math.inf}, "factor"),
        ({"window": 1}, "window"),
        ({"window": 2.5}, "window"),
        ({"patience": 0}, "patience"),
    ],
)
def test_a_bound_of_no_use_is_refused_by_name(arguments: dict[str, Any], named: str) -> None:
    with pytest.raises(ValueError, match=named):
        Bounds(**arguments)
