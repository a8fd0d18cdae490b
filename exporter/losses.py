"""The loss of a step of several micro-batches: their mean, each by its weight. Stays on the device; nothing waits for it."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .watched import local

Loss = Tensor | float


class MicroLosses:
    """The micro-batches of the open step."""

    def __init__(self) -> None:
        self._total: Loss | None = None
        self._weight: Loss = 0.0

    def add(self, loss: Loss, tokens: Loss | None = None) -> None:
        """Take a micro-batch's own loss, not divided by their number; ``tokens`` is its weight, without it all weigh the same.

        What is kept is a value of its own: the trainer may write into ``loss`` afterwards.
        """
        weight: Loss = 1.0 if tokens is None else _number(tokens)
        part = _number(loss) * weight
        self._total = part if self._total is None else self._total + part
        self._weight = self._weight + weight

    def take(self, given: Loss | None) -> Loss | None:
        """Return the step's loss and begin the next step: ``given``, or the mean of the micro-batches."""
        total, weight = self._total, self._weight
        self._total, self._weight = None, 0.0
        if given is not None or total is None:
            return given
        if isinstance(weight, torch.Tensor) or weight:
            return total / weight
        return None


def readable(loss: Any) -> Loss | None:
    """Return a loss that a record can hold; None where there is none.

    Raises:
        TypeError, ValueError, OverflowError: it is no number, and no tensor of some.
    """
    if loss is None:
        return None
    if not isinstance(loss, torch.Tensor):
        return float(loss)
    value = local(loss)
    if value.layout is not torch.strided or value.is_quantized or value.is_complex():
        raise TypeError(f"a tensor of type {value.dtype} and layout {value.layout}")
    if not value.numel():
        raise ValueError("a tensor without elements")
    return loss


def _number(value: Loss) -> Loss:
    """Return a loss or a weight as one number in float32 or better, apart from the graph."""
    if not isinstance(value, torch.Tensor):
        return float(value)
    value = local(value).detach()
    value = value if value.dtype is torch.float64 else value.to(torch.float32)
    return value.reshape(()) if value.numel() == 1 else value.mean()
