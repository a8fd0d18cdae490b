"""A plain training script that knows nothing of trainwarden: a small character model on this file's own text.

    trainwarden exec --run unmodified -- python examples/unmodified.py [steps]

Gradients are accumulated over two micro-batches and clipped; what it prints is all that it says. Its records are in
``.trainwarden/unmodified`` afterwards. Without the first half of the command it does the same, unobserved.
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch
from torch import nn

LENGTH, WIDTH, ACCUMULATE = 32, 64, 2


def main(steps: int = 100) -> None:
    """Train for some steps."""
    torch.manual_seed(0)
    text = torch.tensor(list(Path(__file__).read_bytes()))
    model = nn.Sequential(nn.Embedding(256, WIDTH), nn.Linear(WIDTH, WIDTH), nn.GELU(), nn.Linear(WIDTH, 256))
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
    for _ in range(steps):
        mean = 0.0
        for _ in range(ACCUMULATE):
            starts = torch.randint(len(text) - LENGTH - 1, (16,))
            rows = torch.stack([text[at : at + LENGTH + 1] for at in starts.tolist()])
            loss = nn.functional.cross_entropy(model(rows[:, :-1]).flatten(0, 1), rows[:, 1:].flatten()) / ACCUMULATE
            loss.backward()
            mean += float(loss.detach())
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
    print(f"{steps} steps, last loss {mean:.6f}")


if __name__ == "__main__":
    main(*(int(argument) for argument in sys.argv[1:]))
