"""Faults of one of two ranks: its device computes wrongly, it reads what the other reads, its replica or its reduction is off."""

from __future__ import annotations

from typing import Any

import torch
from numpy.random import Generator
from torch import Tensor

from .fault import Fault, Training


class _Ranks(Fault):
    """Two processes over gloo, DistributedDataParallel, half of the batch each."""

    world_size = 2
    reference = "two_ranks"


class BadRank(_Ranks):
    """What a block of rank 1 gives back is noisy from one step on: the device of one rank computes wrongly."""

    name = "bad_rank"
    says = "one rank whose device computes wrongly"
    causes = ("hardware",)

    @classmethod
    def draw(cls, chance: Generator) -> dict[str, Any]:
        """Draw from where and how wrongly."""
        return {"first": int(chance.integers(225, 271)), "noise": float(chance.uniform(2, 4))}

    def prepared(self, training: Training) -> None:
        """Put the noise behind the middle block of rank 1."""
        if training.rank == 1:
            chance = torch.Generator().manual_seed(1)

            def noisy(module: Any, inputs: Any, output: Tensor) -> Tensor:
                if training.step + 1 < self.first or not training.core.training:
                    return output
                wrong: Tensor = torch.randn(output.shape, generator=chance)
                return output + float(self.values["noise"]) * output.detach().std() * wrong

            training.core.blocks[1].register_forward_hook(noisy)


class DuplicateShards(_Ranks):
    """A sampler that knows no ranks: both read the same samples (case A22)."""

    name = "duplicate_shards"
    says = "two ranks that read the same samples"
    causes = ("data", "distributed")

    @classmethod
    def draw(cls, chance: Generator) -> dict[str, Any]:
        """Draw nothing: it is so from the first step on."""
        return {"first": 1}

    def spreads(self) -> bool:
        """Leave out the sampler that shares them out."""
        return False


class ReplicaDrift(_Ranks):
    """Rank 1 loses a part of each update: the replicas are one model no longer."""

    name = "replica_drift"
    says = "a replica that loses a part of each update"
    causes = ("distributed",)

    @classmethod
    def draw(cls, chance: Generator) -> dict[str, Any]:
        """Draw from where, and which share of an update is lost."""
        return {"first": int(chance.integers(225, 271)), "lost": float(chance.uniform(0.5, 1.0))}

    def before(self, training: Training, step: int) -> None:
        """Keep the parameters."""
        if training.rank == 1 and step >= self.first:
            training.kept["before"] = [one.detach().clone() for one in training.core.parameters()]

    def updated(self, training: Training, step: int) -> None:
        """Take back a part of the update."""
        if training.rank == 1 and step >= self.first:
            with torch.no_grad():
                for one, before in zip(training.core.parameters(), training.kept["before"], strict=True):
                    one.lerp_(before, self.values["lost"])


class WrongReduction(_Ranks):
    """A collective gives rank 0 wrong values of one tensor (case A25)."""

    name = "wrong_reduction"
    says = "a reduction that gives one rank wrong values"
    causes = ("distributed",)

    @classmethod
    def draw(cls, chance: Generator) -> dict[str, Any]:
        """Draw from where and by how much."""
        return {"first": int(chance.integers(225, 271)), "size": float(chance.uniform(5, 20))}

    def gradients(self, training: Training, step: int) -> None:
        """Overwrite a part of the reduced gradient on rank 0."""
        if training.rank == 0 and step >= self.first:
            chance = torch.Generator().manual_seed(step)
            for block in training.core.blocks:
                grad = block.mlp[0].weight.grad
                grad.add_(self.values["size"] * grad.std() * torch.randn(grad.shape, generator=chance))


KINDS: tuple[type[Fault], ...] = (BadRank, DuplicateShards, ReplicaDrift, WrongReduction)
