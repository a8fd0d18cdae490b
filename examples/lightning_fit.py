"""A fit of Lightning's Trainer that is watched, breaks off, and goes on from its checkpoint with its data.

    python examples/lightning_fit.py [steps]

Run it twice: the second time it goes on where the first ended. Its records stay in ``.trainwarden/lightning``, its
checkpoints in ``.lightning``.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import nn

from trainwarden.exporter.adapters.lightning import TrainwardenCallback

LENGTH, WIDTH = 32, 64


class CharacterModel(pl.LightningModule):
    """Predicts the next byte."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Embedding(256, WIDTH), nn.Linear(WIDTH, WIDTH), nn.GELU(), nn.Linear(WIDTH, 256))

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
        """Return the loss; Lightning does the rest."""
        return nn.functional.cross_entropy(self.layers(batch[:, :-1]).flatten(0, 1), batch[:, 1:].flatten())

    def configure_optimizers(self) -> Any:
        """Return the optimizer and its schedule."""
        optimizer = torch.optim.AdamW(self.parameters(), lr=3e-3)
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / 20))
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


def main(steps: int = 50) -> None:
    """Train for some more steps than the newest checkpoint has."""
    torch.manual_seed(0)
    text = torch.tensor(list(Path(__file__).read_bytes()))
    rows = [text[at : at + LENGTH + 1] for at in range(len(text) - LENGTH - 1)]
    loader = torch.utils.data.DataLoader(rows, batch_size=16, shuffle=True)  # type: ignore[arg-type]

    warden = TrainwardenCallback(run="lightning", wrap={"seed": 0, "dataset": "this file"})
    path = warden.checkpoint()  # what a plan names, else the newest that is whole
    begun = 0 if path is None else int(Path(path).stem.partition("=")[2])
    trainer = pl.Trainer(
        max_steps=begun + steps,
        accumulate_grad_batches=2,
        gradient_clip_val=1.0,
        accelerator="cpu",
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=[warden, ModelCheckpoint(".lightning", "{step}", every_n_train_steps=25, save_top_k=-1)],
    )
    trainer.fit(CharacterModel(), loader, ckpt_path=path)
    print(f"steps {begun + 1} to {trainer.global_step} are recorded")


if __name__ == "__main__":
    main(*(int(argument) for argument in sys.argv[1:]))
