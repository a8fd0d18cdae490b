"""Faults of numbers, of the model's own growth and of the memory that it lies in."""

from __future__ import annotations

from typing import Any

import torch
from numpy.random import Generator

from .fault import Fault, Training, matrices


class Fp16Overflow(Fault):
    """A GradScaler that doubles its scale at every step and hardly takes it back: gradients overflow, and updates are skipped.

    The scaler is torch's. Gradients are held in float32 and rounded to float16, which overflows at 65504 as it would on a device.
    """

    name = "fp16_overflow"
    says = "gradients in float16 under a scale that only grows"
    causes = ("numeric",)

    def scaler(self) -> Any:
        """Return a scaler that leaves its scale alone until it is time."""
        return torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=self.first)

    def before(self, training: Training, step: int) -> None:
        """Let it grow from now on."""
        if step == self.first + 1:
            training.scaler.set_growth_interval(1)
            training.scaler.set_backoff_factor(0.98)

    def gradients(self, training: Training, step: int) -> None:
        """Round the scaled gradients to float16."""
        for one in training.model.parameters():
            one.grad.copy_(one.grad.half().float())


class AttentionGrowth(Fault):
    """Queries and keys grow by some percent a step: attention turns into a choice of single keys."""

    name = "attention_logits"
    says = "attention logits that grow step by step"
    causes = ("model",)

    @classmethod
    def draw(cls, chance: Generator) -> dict[str, Any]:
        """Draw from where and how fast."""
        return {"first": int(chance.integers(225, 261)), "growth": float(chance.uniform(0.05, 0.1))}

    def updated(self, training: Training, step: int) -> None:
        """Let them grow."""
        if step >= self.first:
            with torch.no_grad():
                for name, one in matrices(training.core):
                    if name.endswith("qkv.weight"):
                        one[: 2 * one.shape[1]].mul_(1 + self.values["growth"])


class WeightGrowth(Fault):
    """Weight decay with its sign lost: all matrices grow by some percent a step."""

    name = "weight_norm"
    says = "weights that grow step by step"
    causes = ("model",)

    @classmethod
    def draw(cls, chance: Generator) -> dict[str, Any]:
        """Draw from where and how fast."""
        return {"first": int(chance.integers(225, 261)), "growth": float(chance.uniform(0.03, 0.05))}

    def updated(self, training: Training, step: int) -> None:
        """Let them grow."""
        if step >= self.first:
            with torch.no_grad():
                for _, one in matrices(training.core):
                    one.mul_(1 + self.values["growth"])


class BitFlip(Fault):
    """The highest bit of one weight's exponent falls over, once. Its own records cannot tell memory from arithmetic (case A38)."""

    name = "bit_flip"
    says = "one bit of one weight falls over"
    causes = ("hardware", "numeric")
    recoverable = True

    def before(self, training: Training, step: int) -> None:
        """Flip it, in the first attempt alone."""
        if step == self.first and training.attempt == 0:
            chance = torch.Generator().manual_seed(step)
            found = matrices(training.core)
            _, weight = found[int(torch.randint(len(found), (), generator=chance))]
            at = int(torch.randint(weight.numel(), (), generator=chance))
            weight.detach().view(-1).view(torch.int32)[at] ^= 1 << 30


class PoisonedCheckpoint(Fault):
    """A block's weights are overwritten in memory, and a checkpoint saves them four steps later: complete, finite, useless."""

    name = "poisoned_checkpoint"
    says = "overwritten weights that the next checkpoint holds"
    causes = ("hardware",)
    recoverable = True

    @classmethod
    def draw(cls, chance: Generator) -> dict[str, Any]:
        """Draw before which checkpoint and which block."""
        return {"first": 40 * int(chance.integers(6, 8)) - 3, "block": int(chance.integers(0, 2)), "size": 0.5}

    def before(self, training: Training, step: int) -> None:
        """Overwrite them, in the first attempt alone."""
        if step == self.first and training.attempt == 0:
            chance = torch.Generator().manual_seed(step)
            with torch.no_grad():
                for name, one in matrices(training.core):
                    if name.startswith(f"blocks.{self.values['block']}."):
                        one.copy_(self.values["size"] * torch.randn(one.shape, generator=chance))


KINDS: tuple[type[Fault], ...] = (Fp16Overflow, AttentionGrowth, WeightGrowth, BitFlip, PoisonedCheckpoint)
