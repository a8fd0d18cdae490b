"""The four lines in a complete script: a small character model on this file's own text.

    python examples/minimal.py [steps]

While it runs, ``curl`` the address that it prints. Its records stay in ``.trainwarden/minimal``.
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch
from torch import nn

from trainwarden.exporter import Exporter

LENGTH, WIDTH = 32, 64


def main(steps: int = 300) -> None:
    """Train for some steps."""
    torch.manual_seed(0)
    text = torch.tensor(list(Path(__file__).read_bytes()))
    rows = [text[at : at + LENGTH + 1] for at in range(len(text) - LENGTH - 1)]
    loader = torch.utils.data.DataLoader(rows, batch_size=16, shuffle=True)  # type: ignore[arg-type]
    model = nn.Sequential(nn.Embedding(256, WIDTH), nn.Linear(WIDTH, WIDTH), nn.GELU(), nn.Linear(WIDTH, 256))
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)

    exporter = Exporter(model, optimizer, run="minimal")  # 1
    loader = exporter.wrap(loader, seed=0, dataset="this file")  # 2: sample positions, and skips after a rollback
    print("not watched" if exporter.port is None else f"http://127.0.0.1:{exporter.port}/metrics")

    while exporter.global_step < steps:
        for batch in loader:
            loss = nn.functional.cross_entropy(model(batch[:, :-1]).flatten(0, 1), batch[:, 1:].flatten())
            optimizer.zero_grad()
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            exporter.step(loss)  # 3: after the update; closes the step's record
            if exporter.global_step >= steps:
                break
    exporter.close()  # 4: also done at exit
    print(f"{steps} steps, last loss {float(loss.detach()):.3f}")


if __name__ == "__main__":
    main(*(int(argument) for argument in sys.argv[1:]))
