"""Norms of many tensors in few kernels. Everything stays on the device; nothing here waits for it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import torch
from torch import Tensor

#: Elements that are worked on at once. On a CPU a block and what is made of it stay in the cache; on a device the bound
#: keeps temporary memory under 64 MiB.
HOST_BLOCK = 2**19
DEVICE_BLOCK = 2**22
#: On a CPU, blocks from this size on are worked on one by one: what is made of one is used while it is in the cache.
HOST_ALONE = 2**14


def accumulation(tensor: Tensor) -> torch.dtype:
    """Return the type in which a tensor's squares are summed: float64 stays, everything lower becomes float32."""
    return torch.float64 if tensor.dtype is torch.float64 else torch.float32


def norms(tensors: Sequence[Tensor], indices: Sequence[int]) -> Iterator[tuple[np.ndarray, Tensor]]:
    """Yield (indices, 1-D tensor of L2 norms) for the tensors, once per device and type."""
    buckets: dict[tuple[torch.device, torch.dtype], tuple[list[int], list[Tensor]]] = {}
    for index, tensor in zip(indices, tensors, strict=True):
        numbers, members = buckets.setdefault((tensor.device, tensor.dtype), ([], []))
        numbers.append(index)
        members.append(tensor)
    for numbers, members in buckets.values():
        yield np.array(numbers, dtype=np.int64), torch.stack(foreach_norm(members))


def foreach_norm(tensors: list[Tensor]) -> list[Tensor]:
    """Return the L2 norm of each of some tensors of one device and type, summed in float32 or better."""
    found = torch._foreach_norm(tensors, 2.0, dtype=accumulation(tensors[0]))
    return list(found)


def blocks(tensor: Tensor) -> Sequence[Tensor]:
    """Return flat pieces of a tensor, each of at most one block."""
    size = HOST_BLOCK if tensor.device.type == "cpu" else DEVICE_BLOCK
    flat = tensor.reshape(-1)
    return (flat,) if flat.numel() <= size else torch.split(flat, size)


def full_precision(tensors: list[Tensor]) -> list[Tensor]:
    """Return the tensors in float32 or better; those that are so already are not copied."""
    return [tensor.to(accumulation(tensor)) for tensor in tensors]
