"""How often an element of a tensor is held among the ranks, told from its placements. Reads no value, issues no collective.

A sum over all elements is right when each element counts once. So each rank adds what it holds, weighted by one over the number
of ranks that hold the same. Of the ranks that train the same parameters, say c, an element of a tensor that is split into s
different parts is held by c / s: its squares count s / c. Replicated dimensions of a mesh (HSDP, tensor parallelism's norms)
split nothing, sharded ones split by their size, however unevenly. A partial sum can be told from none of its parts.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

_PLAIN = (torch.Tensor, nn.Parameter)

#: Wrappers whose shards are plain flat tensors, of which nothing tells what is where.
OPAQUE = ("FullyShardedDataParallel",)


def parts(tensor: Tensor) -> float:
    """Return into how many different parts the ranks of its mesh split a tensor: 1 for a plain one, NaN for a partial sum."""
    if type(tensor) in _PLAIN:
        return 1.0
    placements: Any = getattr(tensor, "placements", None)
    if placements is None:
        return 1.0
    mesh: Any = tensor.device_mesh  # type: ignore[attr-defined]
    found = 1.0
    for dimension, placement in enumerate(placements):
        if placement.is_partial():
            return math.nan
        if not placement.is_replicate():
            found *= float(mesh.size(dimension))
    return found


def mesh_size(tensor: Tensor) -> int | None:
    """Return how many ranks share a DTensor, None for a plain tensor."""
    mesh: Any = None if type(tensor) in _PLAIN else getattr(tensor, "device_mesh", None)
    return None if mesh is None else int(mesh.size())


def is_full(tensor: Tensor) -> bool:
    """Say whether each rank holds the tensor's whole value: a plain one, or a DTensor that is replicated throughout."""
    placements: Any = None if type(tensor) in _PLAIN else getattr(tensor, "placements", None)
    return placements is None or all(placement.is_replicate() for placement in placements)


def opaque(model: nn.Module) -> str | None:
    """Return the sentence that under a wrapper of this model it cannot be told which rank holds what, or None."""
    for module in model.modules():
        name = type(module).__name__
        if name in OPAQUE:
            return f"{name} keeps flat shards, and nothing tells whose elements they are; fully_shard's can be told"
    return None


def signature(names: Sequence[str], params: Sequence[Tensor]) -> str:
    """Return a digest of the parameters' names and whole shapes: ranks that train the same parameters have the same one."""
    digest = hashlib.sha256()
    for name, parameter in zip(names, params, strict=True):
        digest.update(f"{name} {tuple(parameter.shape)}\n".encode())
    return digest.hexdigest()[:32]
