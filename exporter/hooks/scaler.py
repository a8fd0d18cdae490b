"""What a GradScaler does with an optimizer, by listening in on ``torch.amp.GradScaler``.

No optimizer hook tells of a skipped step: without a fused kernel none fires, and with one they fire on the skipped step too,
with gradients that are still scaled. The scaler knows; it is asked for tensors that it made anyway.
"""

from __future__ import annotations

from typing import Any, Protocol
from weakref import WeakSet

import torch
from torch.amp.grad_scaler import GradScaler


class ScalerListener(Protocol):
    """Who wants to know. None of these may raise."""

    def unscaling(self, scaler: Any, optimizer: torch.optim.Optimizer) -> None:
        """The optimizer's gradients are about to be divided by the loss scale."""

    def stepping(self, scaler: Any, optimizer: torch.optim.Optimizer) -> None:
        """``scaler.step(optimizer)`` begins."""

    def stepped(self, scaler: Any, optimizer: torch.optim.Optimizer) -> None:
        """``scaler.step(optimizer)`` is over; whether it updated anything is in the scaler's tensors."""


_listeners: WeakSet[Any] = WeakSet()
_originals: dict[str, Any] = {}


def listen(listener: ScalerListener) -> None:
    """Tell ``listener`` of every scaler's steps from now on."""
    _listeners.add(listener)
    if _originals:
        return
    _originals.update(step=GradScaler.step, unscale_=GradScaler.unscale_)
    step, unscale = _originals["step"], _originals["unscale_"]

    def watched_step(self: Any, optimizer: Any, *args: Any, **kwargs: Any) -> Any:
        _tell("stepping", self, optimizer)
        answer = step(self, optimizer, *args, **kwargs)
        _tell("stepped", self, optimizer)
        return answer

    def watched_unscale(self: Any, optimizer: Any) -> None:
        _tell("unscaling", self, optimizer)
        unscale(self, optimizer)

    watched_step.__doc__, watched_unscale.__doc__ = step.__doc__, unscale.__doc__
    GradScaler.step, GradScaler.unscale_ = watched_step, watched_unscale  # type: ignore[method-assign]


def forget(listener: ScalerListener) -> None:
    """Tell ``listener`` nothing any more; with the last one gone, torch is as it was."""
    _listeners.discard(listener)
    if not _listeners and _originals:
        GradScaler.step, GradScaler.unscale_ = _originals.pop("step"), _originals.pop("unscale_")  # type: ignore[method-assign]


def _tell(method: str, scaler: Any, optimizer: Any) -> None:
    for listener in list(_listeners):
        getattr(listener, method)(scaler, optimizer)
