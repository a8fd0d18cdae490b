"""A hash of the parameters' bits, the same on all ranks for as long as their replicas are.

Only what every rank holds as a whole is hashed: no shard of a DTensor, and nothing where it cannot be told what is one (the flat
shards of FullyShardedDataParallel, or where a trainer says itself which rank's part counts how often). All ranks hash the same at the same step, decided from the step's number alone.
"""

from __future__ import annotations

import torch
from torch import Tensor

from trainwarden.exporter.probes.probe import Closing, Probe
from trainwarden.exporter.sheet import Reading
from trainwarden.exporter.watched import is_sharded
from trainwarden.record import Value

#: Odd multiplier that tells one parameter's bits from another's (2^64 over the golden ratio, as a signed number).
SPREAD = -7046029254386353131
#: Bytes up to which parameters are put together before they are summed, and of what is put together at once.
SMALL, TOGETHER = 2**16, 2**24
WORDS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


class ReplicaHash(Probe):
    """Signal ``param_hash`` at the regular steps of the cadence; never in between, where this rank alone may look closely."""

    name = "replica_hash"

    def __init__(self, world_size: int) -> None:
        self._alone = world_size < 2

    def close(self, closing: Closing) -> None:
        """Hash the parameters as they are after the update."""
        if self._alone or not closing.regular or closing.watched.untold is not None or closing.watched.weighed:
            return
        whole = [parameter.detach() for parameter in closing.watched.params if not is_sharded(parameter)]
        for device in dict.fromkeys(parameter.device for parameter in whole):
            members = [parameter for parameter in whole if parameter.device == device and parameter.numel()]
            if members:
                closing.sheet.add("replica.hash", halves(hash_of(members)))

    def signals(self, reading: Reading) -> dict[str, Value]:
        """Return the hash."""
        total = 0
        pieces = list(reading.pieces("replica.hash"))
        for _, (high, low) in pieces:
            total += (int(high) ^ int(low)) + 1
        return {"param_hash": float(total % 2**32)} if pieces else {}


def hash_of(tensors: list[Tensor]) -> Tensor:
    """Return a hash of some tensors' bits, a 0-dimensional int64, in one pass: words of 64 bits are summed modulo 2^64.

    A changed bit changes a sum by a power of two, so that it is always seen. The sum of each tensor, or of small ones together, is
    multiplied by an odd number of its place.
    """
    sums: list[Tensor] = []
    small: dict[torch.dtype, list[Tensor]] = {}
    for tensor in tensors:
        words = _words(tensor)
        if words.numel() * words.element_size() > SMALL:
            sums.append(words.sum(dtype=torch.int64))
        else:
            small.setdefault(words.dtype, []).append(words)
    for members in small.values():
        begin, size = 0, 0
        for place, words in enumerate(members):
            size += words.numel() * words.element_size()
            if size > TOGETHER or place == len(members) - 1:
                sums.append(torch.cat(members[begin : place + 1]).sum(dtype=torch.int64))
                begin, size = place + 1, 0
    every = torch.stack(sums)
    factors = torch.arange(1, 2 * len(sums), 2, device=every.device) * SPREAD
    return (every * factors).sum()


def halves(number: Tensor) -> Tensor:
    """Return the upper and the lower 32 bits of an int64, as two numbers that float64 holds exactly."""
    return torch.stack([(number >> 32) & 0xFFFFFFFF, number & 0xFFFFFFFF])


def _words(tensor: Tensor) -> Tensor:
    """Return a tensor's bits as flat whole numbers in the order of its indices: of 64 bits where its size allows, else its own width.

    How it lies in memory makes no difference: a rank that loaded its replica otherwise holds the same.
    """
    if tensor.is_complex():
        tensor = torch.view_as_real(tensor)
    size = tensor.element_size()
    flat = tensor.contiguous().reshape(-1)
    if flat.numel() * size % 8:
        return flat.view(WORDS[size])
    return (flat.clone() if flat.storage_offset() * size % 8 else flat).view(torch.int64)
