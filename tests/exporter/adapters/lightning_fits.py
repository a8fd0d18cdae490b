"""Small fits of Lightning's Trainer on a CPU, and what they left in the journal."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import nn
from torch.utils.data import DataLoader

from tests.exporter.runs import Block, events, lines, make, norm64, tokens
from trainwarden.exporter.adapters.lightning import TrainwardenCallback
from trainwarden.record import Step

ROOT = Path(__file__).parents[3]
ROWS = [tokens(step)[0] for step in range(48)]


class Module(pl.LightningModule):
    """A small language model; ``poison`` is the batch whose loss is not finite."""

    def __init__(self, poison: int | None = None, schedule: bool = False) -> None:
        super().__init__()
        self.model = make()
        self.poison = poison
        self.schedule = schedule
        self.seen: list[torch.Tensor] = []

    def loss(self, batch: torch.Tensor) -> torch.Tensor:
        logits = self.model(batch[:, :-1]).flatten(0, 1).float()
        return nn.functional.cross_entropy(logits, batch[:, 1:].flatten())

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
        self.seen.append(batch.clone())
        loss = self.loss(batch)
        return loss * float("nan") if batch_idx == self.poison else loss

    def validation_step(self, batch: torch.Tensor, batch_idx: int) -> None:
        self.log("val_loss", self.loss(batch))

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=1e-2)
        if not self.schedule:
            return optimizer
        scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (step + 1))
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}


def loader(count: int = 24, shuffle: bool = False, **arguments: Any) -> DataLoader[torch.Tensor]:
    return DataLoader(ROWS[:count], batch_size=4, shuffle=shuffle, **arguments)  # type: ignore[arg-type]


def warden(folder: Path, **arguments: Any) -> TrainwardenCallback:
    return TrainwardenCallback("run", dir=folder, port=0, reader_seconds=0.0, **arguments)


def trainer(folder: Path, *callbacks: Any, **arguments: Any) -> pl.Trainer:
    saves = any(isinstance(callback, ModelCheckpoint) for callback in callbacks)
    settings: dict[str, Any] = {
        "accelerator": "cpu",
        "devices": 1,
        "logger": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "enable_checkpointing": saves,
        "default_root_dir": folder,
        "callbacks": list(callbacks),
    }
    return pl.Trainer(**{**settings, **arguments})


def fit(
    folder: Path,
    module: pl.LightningModule,
    *callbacks: Any,
    data: Any = None,
    path: str | None = None,
    **arguments: Any,
) -> pl.Trainer:
    made = trainer(folder, *callbacks, **arguments)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        made.fit(module, loader() if data is None else data, ckpt_path=path)
    return made


def records(folder: Path) -> list[Step]:
    return [line for line in lines(folder) if isinstance(line, Step)]


def checkpoints(folder: Path) -> list[tuple[int, str]]:
    found = [event for event in events(folder, "checkpoint") if event.fields.get("complete")]
    return [(event.step or 0, Path(event.fields["path"]).name) for event in found]


def reference(module: Module, batches: list[torch.Tensor], divisor: int | None = None) -> tuple[float, float]:
    """Return mean loss and gradient norm of some micro-batches, in float64."""
    model = Block().double()
    model.load_state_dict({name: value.double() for name, value in module.model.state_dict().items()})
    losses = []
    for batch in batches:
        loss = nn.functional.cross_entropy(model(batch[:, :-1]).flatten(0, 1), batch[:, 1:].flatten())
        (loss / (divisor or len(batches))).backward()
        losses.append(float(loss.detach()))
    return sum(losses) / len(losses), norm64([p.grad for p in model.parameters() if p.grad is not None])


class References(pl.Callback):
    """Computes each step's loss and norm anew, in float64, before the step is made."""

    def __init__(self, accumulate: int = 1, batches: int = 6) -> None:
        self.window: list[torch.Tensor] = []
        self.accumulate, self.batches = accumulate, batches
        self.expected: list[tuple[float, float]] = []

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: torch.Tensor, batch_idx: int) -> None:
        self.window.append(batch.clone())
        if len(self.window) == self.accumulate or batch_idx + 1 == self.batches:
            self.expected.append(reference(pl_module, self.window, self.accumulate))
            self.window = []


class Pair(pl.LightningModule):
    """Two optimizers under manual optimization; the second steps every other batch."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.first, self.second = make(1), make(2)
        self.losses: list[list[tuple[float, float]]] = []

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
        total = torch.zeros(())
        self.losses.append([])
        for number, (part, optimizer) in enumerate(zip((self.first, self.second), self.optimizers(), strict=True)):
            if number == 1 and batch_idx % 2:
                continue
            loss = nn.functional.cross_entropy(part(batch[:, :-1]).flatten(0, 1), batch[:, 1:].flatten())
            optimizer.zero_grad()
            self.manual_backward(loss)
            self.losses[-1].append((float(loss), norm64([p.grad for p in part.parameters() if p.grad is not None])))
            optimizer.step()
            total = total + loss.detach()
        return total

    def configure_optimizers(self) -> Any:
        return [torch.optim.AdamW(self.first.parameters(), lr=1e-2), torch.optim.SGD(self.second.parameters(), lr=1e-1)]
