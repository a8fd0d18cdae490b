"""A toy in two lines: one weight, one gradient that is 50 times too large, without clipping and clipped to norm 1.

w = 1, loss = 0.5 w^2, SGD with learning rate 0.1. At step 6 the gradient is multiplied by 50. The exporter sees the same norm
in both runs, because it looks before clipping; what the update does differs twentyfold. Run it::

    python examples/toy_clip.py

(The loss after step n is the loss that record n + 1 holds: a record has the loss before its update.)
"""

from __future__ import annotations

import tempfile
from pathlib import Path

import torch
from torch import nn

from trainwarden.exporter import Exporter
from trainwarden.record import Step, decode_lines
from trainwarden.runfolder import RunFolder

BAD_STEP, TIMES, STEPS = 6, 50.0, 8


class Toy(nn.Module):
    """One weight and its loss."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.ones(()))

    def forward(self) -> torch.Tensor:
        """Return 0.5 w^2."""
        return 0.5 * self.w**2


def train(run: str, folder: Path, max_norm: float | None) -> list[Step]:
    """Train the toy and return the exporter's records."""
    model = Toy()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    exporter = Exporter(model, optimizer, run=run, dir=folder, port=0)
    for step in range(1, STEPS + 1):
        optimizer.zero_grad()
        loss = model()
        loss.backward()
        if step == BAD_STEP and model.w.grad is not None:
            model.w.grad.mul_(TIMES)
        if max_norm is not None:
            torch.nn.utils.clip_grad_norm_(model.parameters(), max_norm)
        optimizer.step()
        exporter.step(loss)
    exporter.close()
    lines = [line for path in RunFolder(run, folder).journal_files() for line in decode_lines(path.open("rb"))]
    return [line for line in lines if isinstance(line, Step)]


def main() -> None:
    """Print both runs side by side."""
    with tempfile.TemporaryDirectory() as folder:
        free = train("free", Path(folder), None)
        clipped = train("clipped", Path(folder), 1.0)
    print("          no clipping            clipped to norm 1")
    print("step   |g|     loss after     |g|     loss after")
    for number in range(STEPS - 1):
        cells = [f"{number + 1:>4}"]
        for records in (free, clipped):
            norm, after = records[number].value("grad_norm"), records[number + 1].value("loss")
            cells.append(f"{norm:>6.2f}  {after:>10.3f} ")
        print("  ".join(cells), "<- 50 times too large" if number + 1 == BAD_STEP else "")


if __name__ == "__main__":
    main()
