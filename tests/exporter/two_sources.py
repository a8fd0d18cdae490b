"""Real training on two sources of data, of which one can be learned and the other cannot."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

from tests.exporter.runs import watch
from trainwarden.exporter import Exporter

VOCABULARY, LENGTH, ROWS = 24, 12, 16


class TwoSources(Dataset[Any]):
    """Rows in which one counts up (``counting``), and rows of random tokens where ``is_hard`` says so (``noise``)."""

    def __init__(self, is_hard: torch.Tensor) -> None:
        chance = torch.Generator().manual_seed(5)
        counting = torch.randint(0, VOCABULARY, (len(is_hard), 1), generator=chance) + torch.arange(LENGTH)
        noise = torch.randint(0, VOCABULARY, (len(is_hard), LENGTH), generator=chance)
        self.is_hard = is_hard
        self.rows = torch.where(is_hard[:, None], noise, counting % VOCABULARY)

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, row: int) -> Any:
        return {"input_ids": self.rows[row], "source": "noise" if self.is_hard[row] else "counting"}


def train_on(data: TwoSources, folder: Path, per_sample: bool = False) -> Exporter:
    """Train a small model on all rows in their order, 16 a step, and return its exporter, which is still open."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(VOCABULARY, 32), nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, VOCABULARY))
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    exporter = watch(model, optimizer, folder)
    for batch in exporter.wrap(DataLoader(data, batch_size=ROWS), order="sequential", reserve=0.0, dataset="two"):
        ids = batch["input_ids"]
        losses = nn.functional.cross_entropy(model(ids[:, :-1]).flatten(0, 1), ids[:, 1:].flatten(), reduction="none")
        of_sample = losses.view(len(ids), -1).mean(1)
        optimizer.zero_grad()
        of_sample.mean().backward()
        optimizer.step()
        exporter.step(of_sample if per_sample else of_sample.mean())
    return exporter
