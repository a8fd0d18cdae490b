"""A run with poisoned batches that a guard keeps out: the same loop twice, and what became of the model.

    python examples/guarded.py

One line makes the guard; the loop is as it was. Every 40th batch brings a gradient that is not finite, and one a gradient a
thousand times too large. Without the guard the first of them ends the run.
"""

from __future__ import annotations

import os
from pathlib import Path

import torch
from torch import nn

from trainwarden.exporter import Exporter
from trainwarden.exporter.guard import Guard

VOCABULARY, WIDTH, LENGTH, BATCH = 61, 32, 24, 16


class Model(nn.Module):
    """Predicts the next token from the present one."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(VOCABULARY, WIDTH)
        self.body = nn.Sequential(
            nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH)
        )
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        """Return logits (batch, tokens, vocabulary) of ids (batch, tokens)."""
        x = self.tokens(ids)
        logits: torch.Tensor = self.head(x + self.body(x))
        return logits


def train(run: str, folder: Path, steps: int, guarded: bool) -> tuple[Model, float]:
    """Train and return the model and the loss of a batch that it has not seen."""
    torch.manual_seed(0)
    model = Model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, fused=True)
    exporter = Exporter(model, optimizer, run=run, dir=folder, port=0, reader_seconds=0.0)
    if guarded:
        guard = Guard(exporter, factor=20.0)
        guard.shrink_embeddings(alpha=0.1)

    def loss_of(seed: int) -> torch.Tensor:
        first = torch.randint(0, VOCABULARY, (BATCH, 1), generator=torch.Generator().manual_seed(seed))
        ids = (first + 7 * torch.arange(LENGTH)) % VOCABULARY  # each token follows from the one before
        return nn.functional.cross_entropy(model(ids[:, :-1]).flatten(0, 1), ids[:, 1:].flatten())

    for step in range(1, steps + 1):
        optimizer.zero_grad()
        loss = loss_of(step)
        poison = float("nan") if step % 40 == 0 else 1e3 if step == 70 else 1.0
        (loss * poison).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        exporter.step(loss)
    exporter.close()
    with torch.no_grad():
        return model, float(loss_of(10**6))


def main(steps: int = 200) -> None:
    """Train both ways and say what came of it."""
    folder = Path(os.environ.get("TRAINWARDEN_DIR", ".trainwarden"))
    for run, guarded in (("unguarded", False), ("guarded", True)):
        model, loss = train(run, folder, steps, guarded)
        finite = all(bool(parameter.isfinite().all()) for parameter in model.parameters())
        print(f"{run:>9}: parameters {'finite' if finite else 'not finite'}, loss of a fresh batch {loss:.3f}")
    print(f"records in {folder}/guarded, to be judged by: trainwarden replay {folder}/guarded")


if __name__ == "__main__":
    main()
