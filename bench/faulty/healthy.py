"""Healthy runs, the references among them: nobody is to be woken, and nothing is to be done."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from numpy.random import Generator

from trainwarden.demo.scale import Scale

from .fault import Fault, Training
from .texts import Rows


class _Healthy(Fault):
    healthy = True

    @classmethod
    def draw(cls, chance: Generator) -> dict[str, Any]:
        """Draw nothing."""
        return {"first": 1}


class Plain(_Healthy):
    """The reference: no fault."""

    name = "plain"
    says = "no fault: the reference"


class Mixed(_Healthy):
    """The reference of a mixture of two sources."""

    name = "mixed"
    says = "no fault, two sources well mixed: a reference"
    mixed = True


class TwoRanks(_Healthy):
    """The reference of two ranks."""

    name = "two_ranks"
    says = "no fault, two ranks: a reference"
    world_size = 2


class SmallBatches(_Healthy):
    """Two rows a step: gradients and losses are noisy throughout."""

    name = "small_batches"
    says = "noisy small batches"

    def scale(self, scale: Scale) -> Scale:
        """Return a run of small batches."""
        return replace(scale, batch_size=2, lr=1e-3)


class Epochs(_Healthy):
    """So little text that it is read several times: the loss falls in steps where an epoch begins."""

    name = "epochs"
    says = "several epochs over little text"

    @classmethod
    def draw(cls, chance: Generator) -> dict[str, Any]:
        """Draw how many steps an epoch has."""
        return {"first": 1, "epoch": int(chance.integers(60, 101))}


class Curriculum(Fault):
    """A shard of another source, which an event announces before it begins and before it ends."""

    name = "curriculum"
    says = "a change of the data that an event announces"
    healthy = True

    @classmethod
    def draw(cls, chance: Generator) -> dict[str, Any]:
        """Draw nothing: the place follows from the order of the shards."""
        return {}

    def spoil(self, rows: Rows, other: Rows, chance: Generator) -> None:
        """Put rows of the other source here."""
        rows[:] = other[chance.choice(len(other), len(rows), replace=False)]

    def before(self, training: Training, step: int) -> None:
        """Announce it."""
        if step == self.first:
            training.exporter.event("stage", name="tables")
        elif step == self.values["last"] + 1:
            training.exporter.event("stage", name="sources")


class PlannedDecay(_Healthy):
    """A constant rate, and a fast decay at the end: the loss drops with it (case B11)."""

    name = "planned_decay"
    says = "a learning rate that is constant and then decays fast"

    @classmethod
    def draw(cls, chance: Generator) -> dict[str, Any]:
        """Draw where it begins to decay."""
        return {"first": int(chance.integers(240, 301))}

    def rate(self, done: int, scale: Scale) -> float:
        """Return warm-up, plateau and decay."""
        left = (scale.steps - done) / (scale.steps - self.first)
        return min(1.0, (done + 1) / scale.warmup_steps, max(0.02, left))


class Resumed(Fault):
    """Stopped and resumed, with all that belongs to it."""

    name = "resumed"
    says = "a run that is stopped and resumed well"
    healthy = True
    resumes = True

    def prepared(self, training: Training) -> None:
        """Do nothing: all is restored."""


KINDS: tuple[type[Fault], ...] = (Plain, Mixed, TwoRanks, SmallBatches, Epochs, Curriculum, PlannedDecay, Resumed)
