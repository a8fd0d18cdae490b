"""The loss of a step, taken from what the script differentiates: the sum of the scalars on which ``backward`` was called.

A trainer that accumulates gradients divides each micro-batch's loss, so that the sum is their mean; the sum is what the step
follows, in any case. A loss that a GradScaler multiplied is taken as it was before. Everything stays on the device.
"""

from __future__ import annotations

import weakref
from typing import Any

import torch
from torch import Tensor

#: Scaled losses that may wait for their backward pass.
WAITING = 16


class Losses:
    """Adds up the roots of backward passes from one :meth:`take` to the next."""

    def __init__(self) -> None:
        self._sum: Tensor | None = None
        self._known = True
        self._scaled: list[tuple[Any, Tensor, Any]] = []
        #: Whether a root came since the last :meth:`take`, and whether one of them was made by a scaler.
        self.seen = False
        self.scaling = False

    def scaled(self, scaler: Any, outputs: Any, result: Any) -> None:
        """Keep the loss that ``scaler`` multiplied."""
        if scaler.is_enabled() and isinstance(outputs, torch.Tensor):
            self._scaled = [*self._scaled[1 - WAITING :], (weakref.ref(result), outputs.detach(), scaler)]

    def backward(self, roots: list[Tensor]) -> None:
        """Add the roots of one backward pass."""
        with torch.no_grad():
            for root in roots:
                self._add(root, self._plain(root))

    def _plain(self, root: Tensor) -> Tensor:
        """Return a root without the loss scale in it."""
        for at, (result, given, _) in enumerate(self._scaled):
            if result() is root:
                del self._scaled[at]
                self.scaling = True
                return given
        if self._scaled:  # what the scaler returned was worked on: the scale is still in it
            self.scaling = True
            scale: Tensor = self._scaled.pop()[2]._scale
            return root.detach() / scale
        return root.detach()

    def _add(self, root: Tensor, value: Tensor) -> None:
        self.seen = True
        if any(not placement.is_replicate() for placement in getattr(root, "placements", ())):
            self._known = False  # a part of a loss that only all ranks together have
            return
        value = getattr(value, "_local_tensor", value).reshape(())
        value = value if value.dtype is torch.float64 else value.float()
        if self._sum is None:
            self._sum = value.clone()
        elif self._sum.device == value.device:
            self._sum = self._sum + value
        else:
            self._known = False  # to add them, one device would have to wait for the other

    def forget(self) -> None:
        """Make the loss of the open step unknown."""
        self._known = False

    def put_back(self, loss: Tensor | None) -> None:
        """Add a sum that was taken before."""
        if loss is not None:
            self._add(loss, loss)

    def take(self) -> Tensor | None:
        """Return the sum, None where it is not known, and begin anew."""
        found = self._sum if self._known else None
        self._sum, self._known, self._scaled = None, True, []
        self.seen = self.scaling = False
        return found
