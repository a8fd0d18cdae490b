"""Norms of many tensors in few kernels. Everything stays on the device; nothing here waits for it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence

import numpy as np
import torch
from torch import Tensor

#: Elements that are worked on at once. On a CPU a block and what is made of it stay in the cache; on a device the bound
#: keeps temporary memory under 64 MiB.
HOST_BLOCK = 2**19
DEVICE_BLOCK = 2**22
#: Tensors up to this size are always summed in float64; so many of them are gone through together on a CPU.
SMALL, MANY = 2**13, 16
#: Elements whose squares are summed in float32 on a CPU; the sums of rows are summed in float64.
ROW = 2**10
#: On a CPU, blocks from this size on are worked on one by one: what is made of one is used while it is in the cache.
HOST_ALONE = 2**14


def accumulation(tensor: Tensor) -> torch.dtype:
    """Return the type in which a tensor's squares are summed: float64 stays, everything lower becomes float32."""
    return torch.float64 if tensor.dtype is torch.float64 else torch.float32


class Reach:
    """Tells whether squares may be summed in float32: where they neither overflow nor vanish, which is three times as fast on a CPU.

    What was measured lately decides, by quantity. Until the first measurement has been looked at, every now and then, and for a while
    after something was out of reach, sums are in float64. So one measurement can be wrong, the first of values that jumped by four
    orders of magnitude at least and past 1e18; it is infinite then. On CUDA sums are in float64 always: they cost nothing there.
    """

    #: Root mean square and norm within which float32 is right to a part in 10 million.
    LOWEST, LARGEST = 1e-17, 1e17
    #: Measurements in float64 after something was out of reach, and how often in between.
    AFTER, EVERY = 64, 32

    def __init__(self) -> None:
        self._held: dict[str, int] = {}
        self._since: dict[str, int] = {}
        self._seen: set[str] = set()

    def wide(self, name: str) -> bool:
        """Say whether the next measurement of a quantity is summed in float64. Training thread."""
        held = self._held.get(name, 0)
        since = self._since.get(name, 0) + 1
        wide = name not in self._seen or held > 0 or since >= self.EVERY
        self._held[name] = max(0, held - 1)
        self._since[name] = 0 if wide else since
        return wide

    def saw(self, name: str, values: np.ndarray, sizes: np.ndarray) -> None:
        """Look at norms of tensors with so many elements. Drain thread."""
        means = values / np.sqrt(np.maximum(sizes, 1.0))
        if not bool(np.all((values <= self.LARGEST) & ((means >= self.LOWEST) | (values == 0)))):
            self._held[name] = self.AFTER
        self._seen.add(name)


def norms(tensors: Sequence[Tensor], indices: Sequence[int], wide: bool = True) -> Iterator[tuple[np.ndarray, Tensor]]:
    """Yield (indices, 1-D tensor of L2 norms) for the tensors, once per device and type. ``wide`` is that of :func:`foreach_norm`."""
    buckets: dict[tuple[torch.device, torch.dtype], tuple[list[int], list[Tensor]]] = {}
    for index, tensor in zip(indices, tensors, strict=True):
        numbers, members = buckets.setdefault((tensor.device, tensor.dtype), ([], []))
        numbers.append(index)
        members.append(tensor)
    for numbers, members in buckets.values():
        yield np.array(numbers, dtype=np.int64), norms_of(members, wide)


def norms_of(tensors: list[Tensor], wide: bool = True) -> Tensor:
    """Return the L2 norms of some tensors of one device and type, 1-D. Many small ones on a CPU are gone through together."""
    if not many_small(tensors):
        return torch.stack(foreach_norm(tensors, wide))
    return sums_of(tensors, lambda elements: elements.double().square()).sqrt_()


def many_small(tensors: Sequence[Tensor]) -> bool:
    """Say whether calls by tensor would cost more than what they do: ten thousand parameters of a handful of elements each."""
    return len(tensors) >= MANY and tensors[0].device.type == "cpu" and all(t.numel() <= SMALL for t in tensors)


def sums_of(tensors: Sequence[Tensor], what: Callable[[Tensor], Tensor]) -> Tensor:
    """Return the sums over each of many small tensors of what is made of their elements, a bounded number of elements at once."""
    found: list[Tensor] = []
    members: list[Tensor] = []
    size = 0
    for tensor in tensors:
        if members and size + tensor.numel() > HOST_BLOCK:
            found.append(segment_sums(what(end_to_end(members)), [member.numel() for member in members]))
            members, size = [], 0
        members.append(tensor)
        size += tensor.numel()
    found.append(segment_sums(what(end_to_end(members)), [member.numel() for member in members]))
    return torch.cat(found)


def end_to_end(tensors: Sequence[Tensor]) -> Tensor:
    """Return the elements of some tensors in one dimension, each in the order of its indices; a copy."""
    return torch.cat([tensor.reshape(-1) for tensor in tensors])


def segments(sizes: Sequence[int]) -> Tensor:
    """Return for each element of tensors that lie end to end the number of the tensor that it belongs to."""
    return torch.from_numpy(np.repeat(np.arange(len(sizes)), sizes))


def segment_sums(values: Tensor, sizes: Sequence[int], of: Tensor | None = None) -> Tensor:
    """Return the sums (float64) over pieces of such sizes of ``values`` on a CPU. ``of`` are their :func:`segments`, where known."""
    sums = torch.zeros(len(sizes), dtype=torch.float64)
    return sums.index_add_(0, segments(sizes) if of is None else of, values.double())


def foreach_norm(tensors: list[Tensor], wide: bool = True) -> list[Tensor]:
    """Return the L2 norm of each of some tensors of one device and type, summed in float32 or better.

    ``wide`` sums in float64 what could overflow or vanish in float32. Small tensors are in any case, and CUDA's; float16 can do
    neither.
    """
    kind, device = tensors[0].dtype, tensors[0].device.type
    if device != "cpu":
        double = kind is torch.float64 or (
            kind is not torch.float16 and (device == "cuda" or (wide and device != "mps"))
        )
        return list(torch._foreach_norm(tensors, 2.0, dtype=torch.float64 if double else torch.float32))
    if all(tensor.numel() <= SMALL for tensor in tensors):
        return list(torch._foreach_norm(tensors, 2.0, dtype=torch.float64))
    return [_host_norm(tensor, wide or tensor.numel() <= SMALL) for tensor in tensors]


def _host_norm(tensor: Tensor, wide: bool) -> Tensor:
    """Return a norm (float64) on a CPU, piece by piece: torch copies the whole of a tensor there to sum it in another type.

    In float32 it is taken row by row. One sum over half a million squares is off by 4e-6, 2e-5 for bf16; over rows by 1e-9, for the
    same time.
    """
    double = tensor.dtype is torch.float64 or (wide and tensor.dtype is not torch.float16)
    if double and tensor.numel() <= HOST_BLOCK:
        found: Tensor = torch.linalg.vector_norm(tensor, 2.0, dtype=torch.float64)
        return found
    if not double and tensor.dtype is torch.float32 and tensor.numel() <= HOST_BLOCK and tensor.numel() % ROW == 0:
        rows = torch.linalg.vector_norm(flat(tensor).view(-1, ROW), 2.0, dim=1)
        of_rows: Tensor = torch.linalg.vector_norm(rows, 2.0, dtype=torch.float64)
        return of_rows
    parts = []
    for piece in torch.split(flat(tensor), HOST_BLOCK):
        if double:
            parts.append(torch.linalg.vector_norm(piece, 2.0, dtype=torch.float64).reshape(1))
            continue
        elements, even = piece.float(), piece.numel() - piece.numel() % ROW
        parts.append(torch.linalg.vector_norm(elements[:even].view(-1, ROW), 2.0, dim=1).double())
        if even < piece.numel():
            parts.append(torch.linalg.vector_norm(elements[even:], 2.0).double().reshape(1))
    whole: Tensor = torch.linalg.vector_norm(torch.cat(parts), 2.0)
    return whole


def flat(tensor: Tensor) -> Tensor:
    """Return a tensor's elements in one dimension, as they lie in memory where they lie densely: that needs no copy."""
    return tensor.as_strided((tensor.numel(),), (1,)) if _dense(tensor) else tensor.reshape(-1)


def _dense(tensor: Tensor) -> bool:
    """Say whether the elements fill a piece of memory, each once, in whatever order (a transposed or channels-last tensor)."""
    if tensor.is_contiguous():
        return True
    expected = 1
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size != 1:
            if stride != expected:
                return False
            expected *= size
    return True


def blocks(tensors: Mapping[str, Tensor]) -> Iterator[dict[str, Tensor]]:
    """Yield flat pieces of tensors of one shape, each of at most one block; elements of one place stay at one place."""
    first = next(iter(tensors.values()))
    size = HOST_BLOCK if first.device.type == "cpu" else DEVICE_BLOCK
    alike = all(tensor.stride() == first.stride() for tensor in tensors.values())
    whole = {name: flat(tensor) if alike else tensor.reshape(-1) for name, tensor in tensors.items()}
    if first.numel() <= size:
        yield whole
        return
    cut = {name: torch.split(tensor, size) for name, tensor in whole.items()}
    for place in range(-(-first.numel() // size)):
        yield {name: pieces[place] for name, pieces in cut.items()}


def full_precision(tensors: list[Tensor]) -> list[Tensor]:
    """Return the tensors in float32 or better; those that are so already are not copied."""
    return [tensor.to(accumulation(tensor)) for tensor in tensors]
