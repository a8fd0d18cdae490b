"""From the device to the host: one packed asynchronous copy a step, and the only place where such a copy is made.

The training thread packs all of a step's scalars into one tensor and never looks at it. On CUDA it is copied into pinned
memory and, after it on the same stream, a sequence word: the drain thread polls that word in plain memory and makes no
CUDA call, which could break a graph capture. (A copy into pageable memory that is read too early gives zeros that look
like a collapsed gradient.) On a CPU the packed tensor is a copy already. Tensors without data (``meta``) give no values.
Nothing here ever blocks: where no slot is free, the step is refused and counted.
"""

from __future__ import annotations

from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from .sheet import Sheet

#: Steps that may be on their way from one device at once: fewer where a step has so many numbers that all of them would take more
#: than so many bytes of pinned memory, but never fewer than the least.
SLOTS, SLOT_BYTES, LEAST_SLOTS = 64, 32 * 2**20, 8


def slots_for(capacity: int) -> int:
    """Return how many steps of at most ``capacity`` numbers may be on their way from one device."""
    return max(LEAST_SLOTS, min(SLOTS, SLOT_BYTES // (8 * capacity)))


class Transfer(Protocol):
    """A packed tensor on its way."""

    def ready(self) -> bool:
        """Say whether :meth:`read` may be called. Reads host memory only."""

    def read(self) -> np.ndarray | None:
        """Return the values (float64), once; None where there are none."""


class _HostTransfer:
    def __init__(self, packed: Tensor) -> None:
        self._packed = packed

    def ready(self) -> bool:
        return True

    def read(self) -> np.ndarray | None:
        found: np.ndarray = self._packed.cpu().numpy()
        return found.astype(np.float64, copy=False)


class _NoTransfer:
    def ready(self) -> bool:
        return True

    def read(self) -> np.ndarray | None:
        return None


class _Slot:
    """One pinned buffer and its sequence word, both also seen as plain host memory."""

    def __init__(self, capacity: int) -> None:
        pinned = torch.cuda.is_available()  # without CUDA there is no lane but in a test
        self.payload = torch.zeros(capacity, dtype=torch.float64, pin_memory=pinned)
        self.word = torch.zeros(1, dtype=torch.int64, pin_memory=pinned)
        self.payload_seen: np.ndarray = self.payload.numpy()
        self.word_seen: np.ndarray = self.word.numpy()
        self.free = True


class _PinnedTransfer:
    def __init__(self, slot: _Slot, ticket: int, length: int) -> None:
        self._slot, self._ticket, self._length = slot, ticket, length

    def ready(self) -> bool:
        return bool(self._slot.word_seen[0] == self._ticket)

    def read(self) -> np.ndarray | None:
        values = self._slot.payload_seen[: self._length].copy()
        self._slot.free = True
        return values


class _PinnedLane:
    """The slots of one CUDA device and the counter that is copied behind each payload."""

    def __init__(self, device: torch.device, capacity: int) -> None:
        self.capacity = capacity
        self._slots = [_Slot(capacity) for _ in range(slots_for(capacity))]
        self._counter = torch.zeros(1, dtype=torch.int64, device=device)
        self._ticket = 0

    def has_room(self, length: int) -> bool:
        return length <= self.capacity and self._slots[self._ticket % len(self._slots)].free

    def send(self, packed: Tensor) -> Transfer:
        length = packed.numel()
        slot = self._slots[self._ticket % len(self._slots)]
        self._ticket += 1
        self._counter.add_(1)
        slot.free = False
        slot.payload[:length].copy_(packed, non_blocking=True)
        slot.word.copy_(self._counter, non_blocking=True)
        return _PinnedTransfer(slot, self._ticket, length)


class Staged:
    """A step's entries on their way to the host."""

    def __init__(self, parts: list[tuple[Transfer, list[tuple[str, Any, int]]]]) -> None:
        self._parts = parts

    def ready(self) -> bool:
        """Say whether everything has arrived; reads host memory only."""
        return all(transfer.ready() for transfer, _ in self._parts)

    def read(self) -> tuple[dict[str, list[tuple[Any, np.ndarray]]], bool]:
        """Return the entries by name, and whether all of them had values."""
        found: dict[str, list[tuple[Any, np.ndarray]]] = {}
        complete = True
        for transfer, layout in self._parts:
            values = transfer.read()
            if values is None:
                complete = False
                continue
            offset = 0
            for name, meta, length in layout:
                found.setdefault(name, []).append((meta, values[offset : offset + length]))
                offset += length
        return found, complete


class Staging:
    """Packs sheets and sends them. ``capacity`` bounds the numbers of one step on one CUDA device."""

    def __init__(self, devices: set[torch.device], capacity: int) -> None:
        self._capacity = capacity
        self._lanes: dict[torch.device, _PinnedLane] = {}
        for device in devices:
            if device.type == "cuda":  # at attach: allocating pinned memory waits for the device
                self._lanes[device] = _PinnedLane(device, capacity)

    def send(self, sheet: Sheet) -> Staged | None:
        """Pack a sheet and start its copy. Returns None, having copied nothing, where a slot is not free."""
        by_device: dict[torch.device, tuple[list[Tensor], list[tuple[str, Any, int]]]] = {}
        for name, meta, tensor in sheet.tensors:
            flat = tensor.detach().reshape(-1)
            if flat.device.type != "mps" and flat.dtype not in (torch.float32, torch.float64):
                flat = flat.to(torch.float64)
            pieces, layout = by_device.setdefault(flat.device, ([], []))
            pieces.append(flat)
            layout.append((name, meta, flat.numel()))
        lanes = {device: self._lane(device) for device in by_device if device.type == "cuda"}
        if not all(
            lane.has_room(sum(piece.numel() for piece in by_device[device][0])) for device, lane in lanes.items()
        ):
            return None
        parts: list[tuple[Transfer, list[tuple[str, Any, int]]]] = []
        for device, (pieces, layout) in by_device.items():
            packed = torch.cat(pieces)
            if device.type != "mps":
                packed = packed.to(torch.float64)
            if device in lanes:
                parts.append((lanes[device].send(packed), layout))
            elif device.type == "meta":
                parts.append((_NoTransfer(), layout))
            else:  # a CPU; on other accelerators the drain thread fetches the copy
                parts.append((_HostTransfer(packed), layout))
        return Staged(parts)

    def _lane(self, device: torch.device) -> _PinnedLane:
        if device not in self._lanes:
            self._lanes[device] = _PinnedLane(device, self._capacity)
        return self._lanes[device]
