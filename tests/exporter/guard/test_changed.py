"""An optimizer that changes under its guard: by a state that was saved with other settings, or by parameters that come later."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from tests.exporter.runs import events, loss_of, make, watch
from trainwarden.exporter.guard import Guard

KINDS = (torch.optim.AdamW, torch.optim.Adam, torch.optim.Adagrad, torch.optim.SGD)


def step(model: nn.Module, optimizer: torch.optim.Optimizer, exporter: Any, number: int, times: float = 1.0) -> None:
    optimizer.zero_grad()
    loss = loss_of(model, number) * times
    loss.backward()
    optimizer.step()
    exporter.step(loss)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("now", [True, False])
def test_a_state_that_was_saved_with_or_without_fused_is_trained_on_and_guarded(
    tmp_path: Path, kind: Any, now: bool
) -> None:
    """``load_state_dict`` takes the saved groups' ``fused`` over: the checkpoints of a script that has just been given it have none."""
    model = make()
    optimizer = kind(model.parameters(), lr=0.05, fused=now)
    saved = kind(model.parameters(), lr=0.05, fused=not now).state_dict()
    exporter = watch(model, optimizer, tmp_path, cadence=1)
    Guard(exporter)
    step(model, optimizer, exporter, 1)
    optimizer.load_state_dict(saved)
    step(model, optimizer, exporter, 2)
    before = [parameter.detach().clone() for parameter in model.parameters()]
    step(model, optimizer, exporter, 3, math.nan)
    assert all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))
    step(model, optimizer, exporter, 4)
    assert not torch.equal(before[0], next(iter(model.parameters())))
    assert not hasattr(optimizer, "found_inf")
    exporter.close()
    said = [event.fields["how"] for event in events(tmp_path, "guard") if "how" in event.fields]
    assert said[-1] == {kind.__name__: "copies" if now else "found_inf"}
    assert not [notice for notice in exporter.notices if "guard" in str(notice) and "copies" not in str(notice)]


def test_a_group_that_is_added_later_is_guarded_with_the_others(tmp_path: Path) -> None:
    model = make()
    *most, last = model.parameters()
    optimizer = torch.optim.AdamW(most, lr=0.05)
    exporter = watch(model, optimizer, tmp_path, cadence=1)
    Guard(exporter)
    step(model, optimizer, exporter, 1)
    optimizer.add_param_group({"params": [last]})
    before = [parameter.detach().clone() for parameter in model.parameters()]
    step(model, optimizer, exporter, 2, math.inf)
    assert all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))
    step(model, optimizer, exporter, 3)
    assert not torch.equal(before[-1], last)
    exporter.close()


def test_what_can_no_longer_be_left_out_is_said_and_the_training_goes_on(tmp_path: Path) -> None:
    model = make()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05, fused=True)
    exporter = watch(model, optimizer, tmp_path, cadence=1)
    Guard(exporter)
    step(model, optimizer, exporter, 1)
    before = next(iter(model.parameters())).detach().clone()
    optimizer.param_groups[0].update(fused=False, differentiable=True)
    step(model, optimizer, exporter, 2)
    assert not torch.equal(before, next(iter(model.parameters())))
    exporter.close()
    assert any("was not guarded" in str(notice) and "differentiable" in str(notice) for notice in exporter.notices)
