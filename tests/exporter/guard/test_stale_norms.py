"""A norm that was clipped with and is not that of the update: the update is judged by the gradients that it has."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch
from torch import nn

from tests.exporter.runs import loss_of, make, watch
from trainwarden.exporter.guard import Guard


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("how", ["another update", "another update, kept memory", "the first of two micro-batches"])
def test_poison_behind_a_clipping_of_something_else_is_left_out(tmp_path: Path, fused: bool, how: str) -> None:
    model = make()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05, fused=fused)
    exporter = watch(model, optimizer, tmp_path, cadence=1)
    Guard(exporter)
    before = [parameter.detach().clone() for parameter in model.parameters()]
    loss_of(model, 1).backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    if how.startswith("another"):  # the trainer passes over its own step
        optimizer.zero_grad(set_to_none="kept" not in how)
    loss = loss_of(model, 2) * math.nan
    loss.backward()
    optimizer.step()
    exporter.step(loss)
    assert all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))
    optimizer.zero_grad()
    loss_of(model, 3).backward()
    optimizer.step()
    exporter.step(0.0)
    exporter.close()
    assert not torch.equal(before[0], next(iter(model.parameters())))


def test_what_is_clipped_and_then_written_to_is_judged_by_its_norm_before_both(tmp_path: Path) -> None:
    model = make()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05, fused=True)
    exporter = watch(model, optimizer, tmp_path, cadence=1)
    Guard(exporter, limit=100.0)
    before = [parameter.detach().clone() for parameter in model.parameters()]
    loss = loss_of(model, 1) * 1e6
    loss.backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    nn.utils.clip_grad_value_(model.parameters(), 0.5)
    nn.utils.clip_grad_value_(model.parameters(), 0.5)
    optimizer.step()
    exporter.step(loss)
    exporter.close()
    assert all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))


@pytest.mark.parametrize("scaled", [False, True])
def test_the_first_of_two_clippings_saw_the_gradient_as_it_was(tmp_path: Path, scaled: bool) -> None:
    model = make()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05, fused=True)
    exporter = watch(model, optimizer, tmp_path, cadence=1)
    Guard(exporter, limit=1000.0)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**20, enabled=scaled)
    left_out = []
    for number, factor in enumerate((1.0, 1e6, 1.0)):
        before = [parameter.detach().clone() for parameter in model.parameters()]
        loss = loss_of(model, number) * factor
        scaler.scale(loss).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1e9 if scaled else 1.0)  # of what is still scaled
        nn.utils.clip_grad_norm_(model.parameters(), 1e9 if scaled else 0.5)
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
        exporter.step(loss)
        left_out.append(all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True)))
        optimizer.zero_grad()
    exporter.close()
    assert left_out == [False, True, False]
