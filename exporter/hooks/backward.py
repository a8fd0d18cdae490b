"""What a script differentiates, by listening in on ``torch.autograd.backward`` and on ``torch.amp.GradScaler.scale``.

``Tensor.backward`` looks the function up at each call, so that replacing the one name reaches every user of it but those who
imported the function itself before. What a scaler was given is kept beside what it returned: the loss without its scale is then
at hand, on the device, and nothing has to be divided.
"""

from __future__ import annotations

import sys
from typing import Any, Protocol
from weakref import WeakSet

import torch
from torch import Tensor
from torch.amp.grad_scaler import GradScaler

from .replaced import Replaced, named_as


class BackwardListener(Protocol):
    """Who wants to know. None of these may raise."""

    def backward(self, roots: list[Tensor]) -> None:
        """Gradients of ``roots``, scalars all, are about to be computed with respect to whatever they depend on."""

    def scaled(self, scaler: Any, outputs: Any, result: Any) -> None:
        """``scaler.scale(outputs)`` returned ``result``: a tensor, or containers of some."""


_listeners: WeakSet[Any] = WeakSet()
_replaced = Replaced()


def listen(listener: BackwardListener) -> None:
    """Tell ``listener`` of every backward pass from now on."""
    _listeners.add(listener)
    if not _replaced.on:
        _replaced.put(torch.autograd, "backward", _backward)
        _replaced.put(GradScaler, "scale", _scale)


def _backward(backward: Any) -> Any:
    def watched_backward(tensors: Any, grad_tensors: Any = None, *args: Any, **kwargs: Any) -> None:
        if grad_tensors is None and not torch.compiler.is_compiling():
            roots = _scalars(tensors)
            if roots:
                for listener in list(_listeners):
                    listener.backward(roots)
        backward(tensors, grad_tensors, *args, **kwargs)

    return named_as(watched_backward, backward)


def _scale(scale: Any) -> Any:
    def watched_scale(self: Any, outputs: Any) -> Any:
        result = scale(self, outputs)
        for listener in list(_listeners):
            listener.scaled(self, outputs, result)
        return result

    return named_as(watched_scale, scale)


def leave_untraced() -> None:
    """Once ``torch.compile`` is loaded, have it run the wrapper as it stands where a compiled function calls ``backward``.

    It stops at ``Tensor.backward`` by itself and would trace what is called from there, which then tells nobody.
    """
    dynamo = sys.modules.get("torch._dynamo")
    if _replaced.on and hasattr(dynamo, "disable") and not hasattr(torch.autograd.backward, "untraced"):
        _replaced.put(torch.autograd, "backward", dynamo.disable)  # type: ignore[union-attr]
        torch.autograd.backward.untraced = True  # type: ignore[attr-defined]


def forget(listener: BackwardListener) -> None:
    """Tell ``listener`` nothing any more; with the last one gone, torch is as it was."""
    _listeners.discard(listener)
    if not _listeners:
        _replaced.give_back()


def _scalars(tensors: Any) -> list[Tensor]:
    """Return the roots as a list where each is a tensor with one element; an empty one else."""
    several = list(tensors) if isinstance(tensors, list | tuple) else [tensors]
    return several if all(isinstance(root, torch.Tensor) and root.numel() == 1 for root in several) else []
