"""What a fault is: where it lies is drawn by a seed, and each moment of a training at which it may act is a method that does nothing here."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, ClassVar

import numpy as np
import torch
from numpy.random import Generator
from torch import Tensor, nn

from trainwarden.demo.scale import Scale
from trainwarden.demo.train import lr_share

from .texts import Rows

#: A GPT of 84,000 parameters; some ten seconds of one core.
SCALE = Scale(
    steps=400, batch_size=16, context=64, width=48, layers=2, lr=2e-3, warmup_steps=40, reserve=0.15,
    checkpoint_every=40, keep_checkpoints=20
)  # fmt: skip
#: Steps between two evaluations.
EVALUATE_EVERY = 60


@dataclass(slots=True)
class Training:
    """What a fault may get hold of while a run trains. ``step`` is the last completed one."""

    model: Any
    core: Any  #: the model without what wraps it for several ranks
    optimizer: torch.optim.Optimizer
    scheduler: torch.optim.lr_scheduler.LambdaLR
    scale: Scale
    rank: int = 0
    attempt: int = 0
    step: int = 0
    scaler: Any = None
    loader: Any = None
    exporter: Any = None
    kept: dict[str, Any] = field(default_factory=dict)  #: a fault's own memory


class Fault:
    """A kind of fault, or with ``healthy`` a kind of run that has none. ``values`` are what :meth:`draw` drew."""

    name: ClassVar[str]
    says: ClassVar[str]
    #: Causes that are right. Several only where the same thing may be called either.
    causes: ClassVar[tuple[str, ...]] = ()
    healthy: ClassVar[bool] = False
    #: Nothing is wrong with the training itself: nobody is to be woken.
    harmless: ClassVar[bool] = False
    #: A rollback by its plan leads past it: it is also run with a daemon, a receiver and a supervisor that act.
    recoverable: ClassVar[bool] = False
    world_size: ClassVar[int] = 1
    #: An eighth of the text is of another source, well mixed.
    mixed: ClassVar[bool] = False
    #: The healthy kind whose held-out loss it is compared with.
    reference: ClassVar[str] = "plain"
    #: Whether the run is stopped in between and resumed, which is where the fault lies.
    resumes: ClassVar[bool] = False
    #: Whether it ends by itself; else it is ended after ``HANGS`` seconds without a step.
    hangs: ClassVar[bool] = False

    def __init__(self, values: dict[str, Any]) -> None:
        self.values = values

    @property
    def first(self) -> int:
        """Return the first step that it touches."""
        return int(self.values["first"])

    @classmethod
    def draw(cls, chance: Generator) -> dict[str, Any]:
        """Draw place and size: ``first``, the first step that it touches, and what else there is.

        By default behind step 220, from which on all windows of the default rules that a run of 400 steps can fill are filled.
        """
        return {"first": int(chance.integers(225, 286))}

    def scale(self, scale: Scale) -> Scale:
        """Return the size of the run."""
        return scale

    def spoil(self, rows: Rows, other: Rows, chance: Generator) -> None:
        """Change the rows of the shard that is read from step ``first`` on; ``other`` are rows of another source."""

    def rate(self, done: int, scale: Scale) -> float:
        """Return the share of the peak rate at the update after ``done`` updates."""
        return lr_share(done, scale)

    def scaler(self) -> Any:
        """Return the GradScaler that the run has, None for none."""
        return None

    def prepared(self, training: Training) -> None:
        """Act once everything is made, before the first step."""

    def loaded(self, training: Training, state: dict[str, Any]) -> None:
        """Act on what was loaded from a checkpoint."""

    def wraps(self) -> bool:
        """Say whether the loader is handed to the exporter."""
        return True

    def spreads(self) -> bool:
        """Say whether several ranks share out the samples."""
        return True

    def batch(self, training: Training, step: int, batch: dict[str, Tensor]) -> dict[str, Tensor]:
        """Return the batch that the step trains on."""
        return batch

    def before(self, training: Training, step: int) -> None:
        """Act before a step's forward pass."""

    def gradients(self, training: Training, step: int) -> None:
        """Act on the gradients of a step before its update."""

    def updated(self, training: Training, step: int) -> None:
        """Act behind the update of a step."""

    def told(self, training: Training, step: int, loss: Tensor) -> Any:
        """Return what the exporter is told to be the loss of a step."""
        return loss

    def evaluated(self, training: Training) -> None:
        """Act at the end of an evaluation."""

    def judged(self) -> tuple[int, int]:
        """Return the steps within which an incident may begin that is of this fault."""
        return self.first - 5, 10**9


def matrices(model: nn.Module) -> list[tuple[str, Tensor]]:
    """Return the names and weights of a model's matrices inside of its blocks."""
    return [(name, one) for name, one in model.named_parameters() if name.startswith("blocks.") and one.ndim == 2]


def chance_of(seed: int, name: str) -> Generator:
    """Return the generator of a kind's places and sizes."""
    return np.random.default_rng((seed, *name.encode()))
