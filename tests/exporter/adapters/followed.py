"""A process that is followed as ``trainwarden exec`` has it followed, and what is left of it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn

from tests.exporter.runs import lines, loss_of, norm64
from trainwarden.exporter.unmodified.attach import Attachment
from trainwarden.record import Step

#: Has this process followed as a fresh one below ``trainwarden exec`` is: the fixture ``begin``.
Begin = Callable[[], Attachment]


def finish(attachment: Attachment) -> list[str]:
    """Do what the end of the process does, and return what was said."""
    exporter = attachment._exporter
    if exporter is not None:
        attachment._at_exit()
        exporter.close()
    attachment.remove()
    return [] if exporter is None else [one for one in exporter.notices if "preflight" not in one]


def records(folder: Path) -> list[Step]:
    return [line for line in lines(folder) if isinstance(line, Step)]


def accumulate(model: nn.Module, optimizer: torch.optim.Optimizer, count: int, seen: list[Any] | None = None) -> None:
    """Train with gradients of two micro-batches, clipped; put each step's mean loss and norm into ``seen``."""
    for step in range(1, count + 1):
        mean = 0.0
        for half in (0, 1):
            loss = loss_of(model, 2 * step + half) / 2
            loss.backward()
            mean += float(loss.detach())
        norm = norm64([p.grad for p in model.parameters() if p.grad is not None])
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        optimizer.zero_grad()
        if seen is not None:
            seen.append((mean, norm))


class Net(nn.Module):
    """One layer; of two such no module owns both."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.layer(x)
        return out
