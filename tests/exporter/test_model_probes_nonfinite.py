"""The first module that was not finite (probe first_nonfinite): which, in which step, on which way."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from tests.exporter.gpt import GPT, batch, gpt, loss_on
from tests.exporter.runs import events, lines, steps, watch
from trainwarden.record import Event, Step


class Back(torch.autograd.Function):
    """Gives back what it is given; the gradient becomes NaN in one place."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        spoilt = gradient.clone()
        spoilt.view(-1)[0] = math.nan
        return spoilt


def spoil_forward(module: nn.Module, args: Any, output: torch.Tensor) -> torch.Tensor:
    """Make one number of an output infinite."""
    spoilt = output.clone()
    spoilt.view(-1)[-1] = math.inf
    return spoilt


def spoil_token(module: nn.Module, args: Any, output: torch.Tensor) -> torch.Tensor:
    """Make all features of one token infinite."""
    spoilt = output.clone()
    spoilt[..., -1, :] = math.inf
    return spoilt


def spoil_backward(module: nn.Module, args: Any) -> Any:
    """Spoil the gradient of what a module takes: as if its own backward did."""
    found: torch.Tensor = Back.apply(args[0])  # type: ignore[no-untyped-call]
    return (found, *args[1:])


def run(
    folder: Path, model: GPT, bad: dict[int, Callable[[], Any]], count: int, accumulate: int = 1, **settings: Any
) -> list[Event]:
    """Train without moving; what ``bad`` gives a step is there for its last micro-batch. Return the events."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    exporter = watch(model, optimizer, folder, **{"watch_steps": 0, **settings})
    state = {name: value.clone() for name, value in model.state_dict().items()}
    for step in range(1, count + 1):
        optimizer.zero_grad()
        for part in range(accumulate):
            handle = bad[step]() if step in bad and part == accumulate - 1 else None
            loss = loss_on(model, batch(step * 10 + part))
            loss.backward()
            if handle is not None:
                handle.remove()
        optimizer.step()
        model.load_state_dict(state)  # 0 times NaN is NaN
        exporter.step(loss.detach())
    steps(exporter, folder)
    return events(folder, "nonfinite")


NAMED = [
    ("wte", "embedding", None),
    ("h.0.ln_1", "norm", 0),
    ("h.1.attn", "attention", 1),
    ("h.1.mlp", "mlp", 1),
    ("h.2", "all", 2),
    ("ln_f", "norm", None),
    ("lm_head", "head", None),
]


def fields(name: str, stage: str, group: str, block: int | None) -> dict[str, Any]:
    found: dict[str, Any] = {"module": name, "stage": stage, "group": group}
    return found if block is None else {**found, "block": block}


@pytest.mark.parametrize(("name", "group", "block"), NAMED)
@pytest.mark.parametrize("step", [1, 4])
def test_the_first_module_of_the_forward_pass_is_named_also_between_the_steps_that_are_due(
    tmp_path: Path, step: int, name: str, group: str, block: int | None
) -> None:
    model = gpt()
    spoil = spoil_forward if step == 1 or group == "all" else spoil_token
    (event,) = run(
        tmp_path, model, {step: lambda: model.get_submodule(name).register_forward_hook(spoil, prepend=True)}, count=5
    )
    assert event.step == step
    assert event.fields == fields(name, "forward", group, block)


def test_the_event_stands_before_the_record_of_its_step_and_the_record_counts_the_activation(tmp_path: Path) -> None:
    model = gpt()
    run(tmp_path, model, {3: lambda: model.h[1].register_forward_hook(spoil_forward, prepend=True)}, count=4)
    told = [line for line in lines(tmp_path) if isinstance(line, Step | Event)]
    at = next(number for number, line in enumerate(told) if isinstance(line, Event) and line.kind == "nonfinite")
    record = told[at + 1]
    assert isinstance(record, Step)
    assert record.step == 3
    counted = [line.value("nonfinite", "activation") for line in told if isinstance(line, Step)]
    assert counted == [0.0, 0.0, 1.0, 0.0]


@pytest.mark.parametrize("name", ["h.0.ln_1", "h.1.attn", "h.1.mlp", "lm_head"])
def test_on_the_way_back_the_module_whose_backward_made_it_is_named_in_a_step_that_is_due(
    tmp_path: Path, name: str
) -> None:
    model = gpt()
    group, block = next((group, block) for known, group, block in [*NAMED, ("h.1.ln_2", "norm", 1)] if known == name)
    handle = {1: lambda: model.get_submodule(name).register_forward_pre_hook(spoil_backward)}
    (event,) = run(tmp_path, model, handle, count=2)
    assert event.fields == fields(name, "backward", group, block)


def test_between_the_steps_that_are_due_the_last_parameter_without_a_finite_gradient_tells(tmp_path: Path) -> None:
    model = gpt()
    (event,) = run(tmp_path, model, {4: lambda: model.h[1].mlp.register_forward_pre_hook(spoil_backward)}, count=5)
    assert event.step == 4
    # What the MLP took is what its norm gave: the norm's are the last parameters that the gradient reached.
    assert event.fields == {**fields("h.1.ln_2", "backward", "norm", 1), "parameter": "h.1.ln_2.bias"}


def test_a_loss_that_is_not_finite_over_finite_modules_names_the_loss(tmp_path: Path) -> None:
    model = gpt()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    exporter = watch(model, optimizer, tmp_path)
    loss = loss_on(model, batch(1))
    exporter.step(loss * math.inf)
    steps(exporter, tmp_path)
    (event,) = events(tmp_path, "nonfinite")
    assert event.fields == {"module": "loss", "stage": "loss"}


def test_of_several_micro_batches_the_one_is_named_in_which_it_came_first(tmp_path: Path) -> None:
    model = gpt()
    bad = {step: lambda: model.h[2].attn.register_forward_hook(spoil_forward, prepend=True) for step in (1,)}
    (event,) = run(tmp_path, model, bad, count=2, accumulate=3)
    assert event.fields == {**fields("h.2.attn", "forward", "attention", 2), "micro_batch": 2}


def test_an_episode_is_told_once_and_another_one_again(tmp_path: Path) -> None:
    model = gpt()
    bad = {step: lambda: model.h[1].register_forward_hook(spoil_forward, prepend=True) for step in (3, 4, 5, 9, 22, 23)}
    told = run(tmp_path, model, bad, count=25)
    assert [event.step for event in told] == [3, 22]


def test_a_gradient_that_overflowed_by_its_loss_scale_is_no_event(tmp_path: Path) -> None:
    model = gpt()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    exporter = watch(model, optimizer, tmp_path)
    for step in range(1, 4):
        optimizer.zero_grad()
        handle = model.h[1].register_forward_pre_hook(spoil_backward) if step == 2 else None
        loss = loss_on(model, batch(step))
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        if handle is not None:
            handle.remove()
        exporter.step(loss)
    assert [record.value("skipped") for record in steps(exporter, tmp_path)] == [0.0, 1.0, 0.0]
    assert events(tmp_path, "nonfinite") == []


def test_of_a_model_without_blocks_the_parameters_tell_of_the_way_back(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    exporter = watch(model, optimizer, tmp_path)
    model(torch.ones(1, 3)).sum().backward()
    gradient = model[0].weight.grad
    assert gradient is not None
    gradient.fill_(math.inf)
    optimizer.step()
    exporter.step(1.0)
    steps(exporter, tmp_path)
    (event,) = events(tmp_path, "nonfinite")
    assert event.fields == {"module": "0", "stage": "backward", "group": "other", "parameter": "0.weight"}


def test_a_value_inside_that_is_not_finite_has_the_next_steps_watched_closely(tmp_path: Path) -> None:
    model = gpt()

    def overflow() -> Any:  # the next block's mask takes it away again: loss and gradients stay finite
        handles = [
            model.h[1].register_forward_hook(spoil_forward, prepend=True),
            model.h[2].register_forward_pre_hook(
                lambda module, args: (torch.nan_to_num(args[0].detach(), posinf=0.0),)
            ),
        ]
        return Both(handles)

    run(tmp_path, model, {3: overflow}, count=60, watch_steps=50)
    records = [line for line in lines(tmp_path) if isinstance(line, Step)]
    due = [record.step for record in records if "activation_rms" in record.signals]
    assert math.isfinite(records[2].value("loss") or math.nan)
    assert records[2].value("nonfinite", "activation") == 1.0
    assert len([step for step in due if step % 10 and step > 3]) > 20


class Both:
    """Several handles as one."""

    def __init__(self, handles: list[Any]) -> None:
        self.handles = handles

    def remove(self) -> None:
        for handle in self.handles:
            handle.remove()
