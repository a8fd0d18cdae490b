"""Faults of the optimizer's state: reset or half restored by a resume, swollen by one gradient, changed by an evaluation."""

from __future__ import annotations

from typing import Any

import torch
from numpy.random import Generator

from .fault import EVALUATE_EVERY, Fault, Training


class Reset(Fault):
    """The optimizer's state is not loaded, and its first updates are one learning rate an element."""

    name = "optimizer_reset"
    says = "an optimizer whose state a resume lost, without a warm-up"
    causes = ("optimizer_state",)
    resumes = True

    def loaded(self, training: Training, state: dict[str, Any]) -> None:
        """Forget both moments and the counter."""
        training.optimizer.state.clear()


class CounterLost(Fault):
    """The moments are loaded, their counter is not: the bias correction begins anew (case A05)."""

    name = "counter_lost"
    says = "an optimizer whose step counter a resume lost"
    causes = ("optimizer_state",)
    resumes = True

    def loaded(self, training: Training, state: dict[str, Any]) -> None:
        """Set the counters to 0."""
        for of in training.optimizer.state.values():
            of["step"].zero_()


class HugeGradient(Fault):
    """One gradient, many times too large, swells the second moment: for hundreds of steps there are next to no updates."""

    name = "huge_gradient"
    says = "one huge gradient that swells the second moment"
    causes = ("optimizer_state",)
    recoverable = True

    @classmethod
    def draw(cls, chance: Generator) -> dict[str, Any]:
        """Draw where and how many times too large."""
        return {"first": int(chance.integers(225, 271)), "times": float(10 ** chance.uniform(4, 6))}

    def gradients(self, training: Training, step: int) -> None:
        """Make the one gradient huge; a later attempt does not meet it again."""
        if step == self.first and training.attempt == 0:
            for one in training.model.parameters():
                one.grad.mul_(self.values["times"])


class EvaluationCorrupts(Fault):
    """Each evaluation runs on coarsely rounded weights and leaves them so (case A39)."""

    name = "evaluation_corrupts"
    says = "evaluations that leave rounded weights behind"
    causes = ("optimizer_state",)

    @classmethod
    def draw(cls, chance: Generator) -> dict[str, Any]:
        """Draw from which evaluation on, and to how many levels a weight is rounded."""
        return {"first": EVALUATE_EVERY * int(chance.integers(3, 5)) + 1, "levels": int(chance.integers(1, 3))}

    def evaluated(self, training: Training) -> None:
        """Round all matrices, those of tokens among them."""
        if training.step + 1 >= self.first:
            with torch.no_grad():
                for one in training.core.parameters():
                    if one.ndim < 2:
                        continue
                    unit = one.abs().amax() / self.values["levels"]
                    one.copy_((one / unit).round() * unit)


KINDS: tuple[type[Fault], ...] = (Reset, CounterLost, HugeGradient, EvaluationCorrupts)
