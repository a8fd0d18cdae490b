"""Gradient norms before clipping, by listening in on ``torch.nn.utils.clip_grad``.

``clip_grad_norm_`` looks its two halves up in its own module at each call (``_get_total_norm``, ``_clip_grads_with_norm_``), so
that replacing those reaches every user of it, also one that imported the name long before. The public names of the two
halves and ``clip_grad_value_`` are replaced wherever a loaded module holds them as a global. What stays unseen: a reference to
one of those three kept elsewhere (in a closure, a class, a partial), and clipping that does not go through torch.

Per-tensor norms are what the total is made from, so for plain tensors they are kept instead of being computed twice; the
total is then the same bits that torch returns.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Protocol
from weakref import WeakSet

import torch
import torch.nn.utils
from torch import Tensor
from torch.nn.utils import clip_grad
from torch.utils._foreach_utils import _has_foreach_support

from trainwarden.exporter.copies import parts
from trainwarden.exporter.watched import is_sharded, local

from .replaced import Replaced, named_as


class ClipListener(Protocol):
    """Who wants to know. None of these may raise."""

    def total_norm(self, tensors: list[Tensor], each: Tensor | None, total: Tensor, norm_type: float) -> None:
        """A norm of ``tensors`` was taken; ``each`` holds their own L2 norms where those were at hand."""

    def clipping(self, parameters: list[Tensor], max_norm: Any, total: Tensor) -> None:
        """The gradients of ``parameters`` are about to be scaled down to ``max_norm``."""

    def clipping_values(self, parameters: list[Tensor]) -> None:
        """The elements of the gradients of ``parameters`` are about to be clamped."""


_listeners: WeakSet[Any] = WeakSet()
_replaced = Replaced()


def listen(listener: ClipListener) -> None:
    """Tell ``listener`` of all clipping from now on.

    Raises:
        RuntimeError: this torch has not the functions that are listened in on.
    """
    _listeners.add(listener)
    if not _replaced.on:
        _install()


def forget(listener: ClipListener) -> None:
    """Tell ``listener`` nothing any more; with the last one gone, torch is as it was."""
    _listeners.discard(listener)
    if not _listeners:
        _replaced.give_back()


def clipped_elsewhere(parameters: Sequence[Tensor], max_norm: float, total: Tensor, knows: Any) -> None:
    """Tell of a trainer that clips by functions of its own, all but the one that ``knows``. ``total`` is the same on all ranks."""
    for listener in list(_listeners):
        if listener is not knows:
            listener.clipping(list(parameters), max_norm, total)


def _install() -> None:
    try:
        total, scale, clamp = clip_grad._get_total_norm, clip_grad._clip_grads_with_norm_, clip_grad.clip_grad_value_
    except AttributeError as error:
        raise RuntimeError(f"torch {torch.__version__} has no {error.name} in torch.nn.utils.clip_grad") from None
    _replaced.put_everywhere({id(total): _total(total), id(scale): _scale(scale), id(clamp): _clamp(clamp)})


def _tell(method: str, *arguments: Any) -> None:
    for listener in list(_listeners):
        getattr(listener, method)(*arguments)


def _as_list(tensors: Tensor | Iterable[Tensor]) -> list[Tensor]:
    return [tensors] if isinstance(tensors, torch.Tensor) else list(tensors)


def _total(original: Callable[..., Tensor]) -> Callable[..., Tensor]:
    def get_total_norm(
        tensors: Tensor | Iterable[Tensor],
        norm_type: float = 2.0,
        error_if_nonfinite: bool = False,
        foreach: bool | None = None,
    ) -> Tensor:
        if torch.compiler.is_compiling():
            return original(tensors, norm_type, error_if_nonfinite, foreach)
        members = _as_list(tensors)
        if not error_if_nonfinite and foreach is not False and _plain(members, norm_type):
            with torch.no_grad():
                norms = list(torch._foreach_norm(members, 2.0))
                total: Tensor = torch.linalg.vector_norm(torch.stack(norms), 2.0)
                # Of a DTensor's norm, each rank has that of its own shard until somebody asks for the whole.
                each = torch.stack([local(norm) for norm in norms])
            _tell("total_norm", members, each, total, 2.0)
            return total
        total = original(members, norm_type, error_if_nonfinite, foreach)
        _tell("total_norm", members, None, total, float(norm_type))
        return total

    return named_as(get_total_norm, original)


def _plain(tensors: list[Tensor], norm_type: float) -> bool:
    """Say whether torch would take the L2 norm of these with one foreach call in full precision."""
    if not tensors or float(norm_type) != 2.0:
        return False
    device, dtype, kind = tensors[0].device, tensors[0].dtype, type(tensors[0])
    return (
        dtype in (torch.float32, torch.float64)
        and (kind is torch.Tensor or _norms_stay_local(tensors))
        and all(type(tensor) is kind and tensor.device == device and tensor.dtype is dtype for tensor in tensors)
        and all(tensor.layout is torch.strided for tensor in tensors)
        and bool(_has_foreach_support(tensors, device))
    )


def _norms_stay_local(tensors: list[Tensor]) -> bool:
    """Say whether these are DTensors of one mesh none of which is a partial sum: their norms are made without sending anything."""
    first = tensors[0]
    return is_sharded(first) and all(
        is_sharded(tensor) and not math.isnan(parts(tensor)) and tensor.device_mesh == first.device_mesh  # type: ignore[attr-defined]
        for tensor in tensors
    )


def _scale(original: Callable[..., None]) -> Callable[..., None]:
    def clip_grads_with_norm_(
        parameters: Tensor | Iterable[Tensor], max_norm: float, total_norm: Tensor, foreach: bool | None = None
    ) -> None:
        if torch.compiler.is_compiling():
            return original(parameters, max_norm, total_norm, foreach)
        members = _as_list(parameters)
        _tell("clipping", members, max_norm, total_norm)
        return original(members, max_norm, total_norm, foreach)

    return named_as(clip_grads_with_norm_, original)


def _clamp(original: Callable[..., None]) -> Callable[..., None]:
    def clip_grad_value_(parameters: Tensor | Iterable[Tensor], clip_value: float, foreach: bool | None = None) -> None:
        if torch.compiler.is_compiling():
            return original(parameters, clip_value, foreach)
        members = _as_list(parameters)
        _tell("clipping_values", members)
        return original(members, clip_value, foreach)

    return named_as(clip_grad_value_, original)
