"""The loss, and what a script logs, in a training loop that ``trainwarden exec`` follows."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from tests.exporter.adapters.followed import Begin, finish, records
from tests.exporter.runs import events, loss_of, make, tokens
from trainwarden.exporter.hooks import backward


class Overflows(torch.autograd.Function):
    """Passes its input on, and makes an infinite gradient where it is told to."""

    @staticmethod
    def forward(ctx: Any, value: torch.Tensor, bad: bool) -> torch.Tensor:
        ctx.bad = bad
        return value.clone()

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        return grads[0] * (float("inf") if ctx.bad else 1.0), None


@pytest.mark.parametrize("divided_after", [False, True])
def test_a_grad_scalers_skipped_steps_are_steps_and_the_loss_is_without_its_scale(
    tmp_path: Path, begin: Begin, divided_after: bool
) -> None:
    attachment = begin()
    model = make()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=100)
    seen = []
    for step in range(1, 9):
        optimizer.zero_grad()
        loss = Overflows.apply(loss_of(model, step), step in (1, 4, 8))
        seen.append(float(loss.detach()) / (2 if divided_after else 1))
        (scaler.scale(loss) / 2 if divided_after else scaler.scale(loss)).backward()
        if step % 2:
            scaler.unscale_(optimizer)
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
    assert finish(attachment) == []
    found = records(tmp_path)
    assert [record.step for record in found] == list(range(1, 9))
    assert [record.value("skipped") for record in found] == [1, 0, 0, 1, 0, 0, 0, 1]
    assert [record.value("loss") for record in found] == pytest.approx(seen, rel=1e-6)
    assert [record.value("loss_scale") for record in found] == [2.0**n for n in (10, 9, 9, 9, 8, 8, 8, 8)]
    assert [record.value("loss_scale_backoffs") for record in found] == [1, 0, 0, 1, 0, 0, 0, 1]
    assert [record.value("grad_norm") is None for record in found] == [n in (1, 4, 8) for n in range(1, 9)]
    assert events(tmp_path, "start")[0].fields["loss_scaling"] is True


def test_what_is_logged_belongs_to_the_step_that_it_was_logged_after_and_is_not_there_twice(
    tmp_path: Path, begin: Begin
) -> None:
    attachment = begin()
    model = make()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    attachment.logged({"config/width": 8})
    for step in range(1, 4):
        loss = loss_of(model, step)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        attachment.logged({"train/loss": 99.0, "lr": 99.0, "grad_norm": 99.0, "global_step": step, "aux_loss": 1.5})
        attachment.logged(
            {"train": {"accuracy": torch.tensor(step / 10)}, "name": "x", "many": torch.ones(3), "on": True}
        )
        with torch.no_grad():
            model.eval()
            loss_of(model, step)
            model.train()
        attachment.logged({"val/loss": float(step)})
    finish(attachment)
    found = records(tmp_path)
    assert found[0].value("config_width") == 8.0
    assert [record.value("train_accuracy") for record in found] == pytest.approx([0.1, 0.2, 0.3])
    assert [record.value("val_loss") for record in found] == [1.0, 2.0, 3.0]
    assert [record.value("router_aux_loss") for record in found] == [1.5] * 3
    assert not any(99.0 in record.signals.values() for record in found)
    assert not {"name", "many", "on", "global_step", "step"} & {name for record in found for name in record.signals}


def test_a_logged_loss_stands_in_where_no_backward_pass_was_seen(tmp_path: Path, begin: Begin) -> None:
    attachment = begin()
    model = make()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(1, 4):
        params = list(model.parameters())
        for param, grad in zip(params, torch.autograd.grad(loss_of(model, step), params), strict=True):
            param.grad = grad
        torch.nn.utils.clip_grad_norm_(params, 0.5)
        optimizer.step()
        attachment.logged({"loss": float("nan") if step == 2 else float(step), "train/loss_mean": 7.0})
    finish(attachment)
    found = records(tmp_path)
    assert [record.value("loss") for record in found] == [1.0, pytest.approx(float("nan"), nan_ok=True), 3.0]
    assert [record.value("nonfinite", "loss") for record in found] == [0.0, 1.0, 0.0]
    assert all((record.value("clip_ratio") or 0) > 1 for record in found)


def test_a_compiled_function_may_hold_the_backward_pass(tmp_path: Path, begin: Begin) -> None:
    attachment = begin()
    model = make()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    @torch.compile(backend="eager")
    def forward_and_backward(ids: torch.Tensor) -> torch.Tensor:
        loss = nn.functional.cross_entropy(model(ids[:, :-1]).flatten(0, 1), ids[:, 1:].flatten())
        loss.backward()
        return loss.detach()

    backward.leave_untraced()
    seen = []
    for step in range(1, 4):
        seen.append(float(forward_and_backward(tokens(step))))
        optimizer.step()
        optimizer.zero_grad()
    finish(attachment)
    assert [record.value("loss") for record in records(tmp_path)] == pytest.approx(seen, rel=1e-6)


class OwnScale(torch.amp.GradScaler):
    """A scaler that multiplies losses by itself, as those for sharded models do."""

    def scale(self, outputs: Any) -> Any:
        assert self._scale is not None or self._lazy_init_scale_growth_tracker(outputs.device) is None
        return outputs * self._scale


def test_a_loss_that_is_scaled_out_of_sight_is_left_out_and_that_is_said(tmp_path: Path, begin: Begin) -> None:
    attachment = begin()
    model = make()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = OwnScale("cpu", init_scale=2.0**10)
    for step in range(1, 4):
        optimizer.zero_grad()
        scaler.scale(loss_of(model, step)).backward()
        scaler.step(optimizer)
        scaler.update()
    said = finish(attachment)
    assert len(said) == 1
    assert said[0].startswith("the loss is scaled")
    found = records(tmp_path)
    assert [record.value("loss") for record in found] == [None] * 3
    assert [record.value("loss_scale") for record in found] == [2.0**10] * 3
    assert all(0 < (record.value("grad_norm") or 0) < 10 for record in found)
