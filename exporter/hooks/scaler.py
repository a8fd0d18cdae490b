"""What a GradScaler does with an optimizer, by listening in on ``torch.amp.GradScaler``.

No optimizer hook tells of a skipped step: without a fused kernel none fires, and with one they fire on the skipped step too,
with gradients that are still scaled. The scaler knows; it is asked for tensors that it made anyway.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, Protocol
from weakref import WeakSet

import torch
from torch.amp.grad_scaler import GradScaler

from .replaced import Replaced, named_as


class ScalerListener(Protocol):
    """Who wants to know. None of these may raise."""

    def unscaling(self, scaler: Any, optimizer: torch.optim.Optimizer) -> None:
        """The optimizer's gradients are about to be divided by the loss scale."""

    def stepping(self, scaler: Any, optimizer: torch.optim.Optimizer) -> None:
        """``scaler.step(optimizer)`` begins."""

    def stepped(self, scaler: Any, optimizer: torch.optim.Optimizer) -> None:
        """``scaler.step(optimizer)`` is over; whether it updated anything is in the scaler's tensors."""


_listeners: WeakSet[Any] = WeakSet()
_replaced = Replaced()


def listen(listener: ScalerListener) -> None:
    """Tell ``listener`` of every scaler's steps from now on.

    A subclass that is known by now is listened to where it does these things in its own way, as FSDP's ShardedGradScaler unscales;
    what it leaves to torch's class is heard of there.
    """
    _listeners.add(listener)
    if _replaced.on:
        return
    for kind in _and_subclasses(GradScaler):
        for name, watched in (("step", _step), ("unscale_", _unscale)):
            if name in vars(kind):
                _replaced.put(kind, name, watched)


def forget(listener: ScalerListener) -> None:
    """Tell ``listener`` nothing any more; with the last one gone, torch is as it was."""
    _listeners.discard(listener)
    if not _listeners:
        _replaced.give_back()


def _and_subclasses(kind: type[Any]) -> Iterator[type[Any]]:
    yield kind
    below: type[Any]
    for below in kind.__subclasses__():
        yield from _and_subclasses(below)


def _step(original: Callable[..., Any]) -> Callable[..., Any]:
    def watched_step(self: Any, optimizer: Any, *args: Any, **kwargs: Any) -> Any:
        _tell("stepping", self, optimizer)
        answer = original(self, optimizer, *args, **kwargs)
        _tell("stepped", self, optimizer)
        return answer

    return named_as(watched_step, original)


def _unscale(original: Callable[..., Any]) -> Callable[..., Any]:
    def watched_unscale(self: Any, optimizer: Any) -> None:
        _tell("unscaling", self, optimizer)
        original(self, optimizer)

    return named_as(watched_unscale, original)


def _tell(method: str, scaler: Any, optimizer: Any) -> None:
    for listener in list(_listeners):
        getattr(listener, method)(scaler, optimizer)
