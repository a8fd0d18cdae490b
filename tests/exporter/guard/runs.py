"""Training with a poisoned batch under a guard, and the same training that never saw that batch."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from tests.exporter.runs import Block, loss_of, make, watch
from trainwarden.exporter.guard import Guard

Optimizers = Callable[[nn.Module], list[torch.optim.Optimizer]]
#: Steps whose batch is poisoned, and by what the loss is multiplied there.
POISON: dict[int, float] = {1: float("nan"), 4: float("inf"), 5: float("nan")}
STEPS = 8


def one(kind: type[torch.optim.Optimizer], **options: Any) -> Optimizers:
    """Return what makes an optimizer of two parameter groups, the second with a rate of its own."""

    def build(model: nn.Module) -> list[torch.optim.Optimizer]:
        *first, last = list(model.parameters())
        groups = [{"params": first}, {"params": [last], "lr": 0.02}]
        return [kind(groups, **{"lr": 0.05, **options})]

    return build


def run(
    build: Optimizers,
    folder: Path | None,
    steps: Iterable[int],
    poison: dict[int, float],
    *,
    clip: float | None = None,
    scaler: torch.amp.GradScaler | None = None,
    micro: int = 1,
    scheduler: bool = False,
    each: Callable[[int, nn.Module], None] | None = None,
    **guard: Any,
) -> tuple[Block, list[torch.optim.Optimizer], Any]:
    """Train on the given batches; with a folder, under an exporter with a guard. ``each`` is called before the update."""
    model = make()
    optimizers = build(model)
    exporter = None
    if folder is not None:
        exporter = watch(model, optimizers, folder, cadence=1)
        Guard(exporter, **guard)
    schedules = [torch.optim.lr_scheduler.ExponentialLR(one, 0.9) for one in optimizers] if scheduler else []
    for step in steps:
        for optimizer in optimizers:
            optimizer.zero_grad()
        for part in range(micro):
            loss = loss_of(model, step * 10 + part) * (poison.get(step, 1.0) if part == 0 else 1.0) / micro
            (scaler.scale(loss) if scaler is not None else loss).backward()
        if clip is not None:
            if scaler is not None:
                for optimizer in optimizers:
                    scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(model.parameters(), clip)
        if each is not None:
            each(step, model)
        for optimizer in optimizers:
            if scaler is not None:
                scaler.step(optimizer)
            else:
                optimizer.step()
        if scaler is not None:
            scaler.update()
        for schedule in schedules:
            schedule.step()
        if exporter is not None:
            exporter.step(loss)
    return model, optimizers, exporter


def state_of(model: nn.Module, optimizers: Sequence[torch.optim.Optimizer]) -> list[torch.Tensor]:
    """Return copies of all parameters and of all state, in one order."""
    found = [parameter.detach().clone() for parameter in model.parameters()]
    for optimizer in optimizers:
        for parameter in model.parameters():
            state = optimizer.state.get(parameter, {})
            found += [state[name].clone() for name in sorted(state) if isinstance(state[name], torch.Tensor)]
    return found


def bits(tensors: Sequence[torch.Tensor]) -> list[bytes]:
    """Return the bytes of tensors."""
    return [tensor.detach().contiguous().numpy().tobytes() for tensor in tensors]


def equal(left: Sequence[torch.Tensor], right: Sequence[torch.Tensor]) -> bool:
    """Say whether two models or states are the same, number by number."""
    return len(left) == len(right) and all(torch.equal(a, b) for a, b in zip(left, right, strict=True))
