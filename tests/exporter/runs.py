"""Small real training runs under a real exporter, and what they left in the journal."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn

from trainwarden.exporter import Exporter
from trainwarden.record import Event, Header, Line, Step, decode_lines
from trainwarden.runfolder import RunFolder

torch.set_num_threads(1)


class Block(nn.Module):
    """One of each part of a transformer that has a group of its own, small enough for a float64 reference."""

    def __init__(self, vocabulary: int = 31, width: int = 8) -> None:
        super().__init__()
        self.wte = nn.Embedding(vocabulary, width)
        self.ln_1 = nn.LayerNorm(width)
        self.attn = nn.Linear(width, width)
        self.mlp = nn.Linear(width, width)
        self.lm_head = nn.Linear(width, vocabulary, bias=False)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.wte(ids)
        x = x + self.attn(self.ln_1(x)).tanh()
        logits: torch.Tensor = self.lm_head(x + self.mlp(x).relu())
        return logits


def make(seed: int = 0, dtype: torch.dtype = torch.float32, **sizes: int) -> Block:
    torch.manual_seed(seed)
    return Block(**sizes).to(dtype)


def tokens(step: int, rows: int = 4, length: int = 12, vocabulary: int = 31) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1000 + step)
    return torch.randint(0, vocabulary, (rows, length), generator=generator)


def loss_of(model: nn.Module, step: int, **sizes: int) -> torch.Tensor:
    ids = tokens(step, **sizes)
    return nn.functional.cross_entropy(model(ids[:, :-1]).flatten(0, 1).float(), ids[:, 1:].flatten())


def watch(model: nn.Module, optimizer: Any, folder: Path, run: str = "run", **arguments: Any) -> Exporter:
    """Return an exporter on an ephemeral port that keeps everything under ``folder``; nobody waits for readers."""
    return Exporter(model, optimizer, run=run, dir=folder, **{"port": 0, "reader_seconds": 0.0, **arguments})


def lines(folder: Path, run: str = "run", rank: int = 0) -> list[Line]:
    """Return all lines of a rank's journals, in order."""
    found: list[Line] = []
    for path in RunFolder(run, folder).journal_files(rank):
        with path.open("rb") as file:
            found.extend(decode_lines(file))
    return found


def steps(exporter: Exporter, folder: Path, run: str = "run", rank: int = 0) -> list[Step]:
    """Close the exporter and return its step records. A fault of its own fails the test."""
    exporter.close()
    assert exporter.notices == [], exporter.notices
    return [line for line in lines(folder, run, rank) if isinstance(line, Step)]


def events(folder: Path, kind: str | None = None, run: str = "run", rank: int = 0) -> list[Event]:
    """Return the events of a rank's journals, all or of one kind."""
    found = [line for line in lines(folder, run, rank) if isinstance(line, Event)]
    return [event for event in found if kind in (None, event.kind)]


def headers(folder: Path, run: str = "run", rank: int = 0) -> list[Header]:
    return [line for line in lines(folder, run, rank) if isinstance(line, Header)]


def train(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    exporter: Exporter,
    count: int,
    each: Callable[[int], None] = lambda step: None,
) -> None:
    """Run ``count`` plain steps; ``each`` is called between backward and update."""
    for step in range(1, count + 1):
        optimizer.zero_grad()
        loss = loss_of(model, step)
        loss.backward()
        each(step)
        optimizer.step()
        exporter.step(loss)


def by_group(model: nn.Module) -> dict[str, list[nn.Parameter]]:
    """Return the parameters of a Block by the group that each belongs to, and all of them."""
    assert isinstance(model, Block)
    return {
        "all": list(model.parameters()),
        "embedding": list(model.wte.parameters()),
        "norm": list(model.ln_1.parameters()),
        "attention": list(model.attn.parameters()),
        "mlp": list(model.mlp.parameters()),
        "head": list(model.lm_head.parameters()),
    }


def norm64(tensors: list[torch.Tensor]) -> float:
    """Return the L2 norm of some tensors, in float64."""
    return float(torch.cat([tensor.detach().double().flatten() for tensor in tensors]).norm())


def rms64(tensors: list[torch.Tensor]) -> float:
    """Return the root mean square over some tensors, in float64."""
    return norm64(tensors) / sum(tensor.numel() for tensor in tensors) ** 0.5
