"""Faults of the instruments, of which nobody is to be woken, and a hang, of which somebody is."""

from __future__ import annotations

import time
from typing import Any

from numpy.random import Generator
from torch import Tensor

from .fault import Fault, Training


class LoggingScale(Fault):
    """The loss that is told is multiplied by a number from one step on (case A30); the training is well."""

    name = "logging_scale"
    says = "a logged loss that is multiplied by the accumulation steps"
    causes = ("instrument",)
    harmless = True

    @classmethod
    def draw(cls, chance: Generator) -> dict[str, Any]:
        """Draw from where and by what."""
        return {"first": int(chance.integers(225, 286)), "times": int(chance.choice([2, 4, 8, 16]))}

    def told(self, training: Training, step: int, loss: Tensor) -> Any:
        """Multiply what is told."""
        return loss.detach() * self.values["times"] if step >= self.first else loss


class StaleMetric(Fault):
    """The loss that is told stands still from one step on; the training is well."""

    name = "stale_metric"
    says = "a logged loss that stands still"
    causes = ("instrument",)
    harmless = True

    def told(self, training: Training, step: int, loss: Tensor) -> Any:
        """Tell the loss of the first step again and again."""
        return loss if step < self.first else training.kept.setdefault("loss", loss.detach().clone())


class Hang(Fault):
    """A step does not end. Nothing but silence tells of it, so that no cause is the right one."""

    name = "hang"
    says = "a step that never ends"
    causes = ("undetermined",)
    hangs = True

    def before(self, training: Training, step: int) -> None:
        """Wait until somebody ends the process."""
        while step == self.first:
            time.sleep(0.2)
            training.kept["asleep"] = True
            if training.kept.get("asked_to_stop"):
                return


KINDS: tuple[type[Fault], ...] = (LoggingScale, StaleMetric, Hang)
