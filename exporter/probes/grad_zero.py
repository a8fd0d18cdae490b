"""The share of gradient elements that are exactly zero: underflow, or parts of the model that nothing reaches."""

from __future__ import annotations

import numpy as np
import torch

from trainwarden.exporter.measure import DEVICE_BLOCK, flat, many_small, sums_of
from trainwarden.exporter.probes.probe import Probe, Shares, Totals, Update
from trainwarden.exporter.sheet import Reading
from trainwarden.exporter.watched import Watched
from trainwarden.record import Value
from trainwarden.signals import GROUPS


class GradZero(Probe):
    """Signal ``grad_zero_ratio`` by group. Scaling and clipping leave zeros where they are."""

    name = "grad_zero"
    costly = True
    summed = ("grad_nonzero", "grad_elements")
    whole = ("grad_zero_ratio",)

    def __init__(self, watched: Watched) -> None:
        self._watched = watched

    def before(self, update: Update) -> None:
        """Count the elements that are not zero."""
        places: dict[torch.device, tuple[list[int], list[torch.Tensor]]] = {}
        for index, gradient in zip(update.indices, update.gradients, strict=True):
            indices, members = places.setdefault(gradient.device, ([], []))
            indices.append(index)
            members.append(gradient)
        for indices, members in places.values():
            update.sheet.add("grad_nonzero", _counts(members), np.array(indices, dtype=np.int64))

    def signals(self, reading: Reading) -> dict[str, Value]:
        """Return the shares, unless the step was skipped."""
        pieces = list(reading.pieces("grad_nonzero"))
        if not pieces or reading.skipped or self._watched.split:
            return {}
        indices, counts = _together(pieces)
        nonzero, sizes = self._watched.group_sums(indices, counts), self._watched.group_sizes(indices)
        return {"grad_zero_ratio": {group: 1.0 - nonzero[group] / sizes[group] for group in nonzero}}

    def shares(self, reading: Reading) -> Shares | None:
        """Return how many elements of this rank's are not zero, of how many."""
        if not (self._watched.summable and reading.measured) or reading.skipped:
            return None
        indices, counts = _together(list(reading.pieces("grad_nonzero")))
        return {
            "grad_nonzero": self._watched.group_shares(indices, counts),
            "grad_elements": self._watched.group_shares(indices, self._watched.sizes_of(indices)),
        }

    def joined(self, reading: Reading, totals: Totals) -> dict[str, Value]:
        """Return the shares of zeros among all elements."""
        found: dict[str, Value] = {}
        for group in GROUPS:
            elements = totals[f"grad_elements.{group}"]
            if elements > 0:
                found[group] = max(0.0, 1.0 - totals[f"grad_nonzero.{group}"] / elements)
        return {"grad_zero_ratio": found} if found else {}


def _counts(tensors: list[torch.Tensor]) -> torch.Tensor:
    if not many_small(tensors):
        return torch.stack([_nonzero(tensor) for tensor in tensors])
    return sums_of(tensors, lambda elements: elements != 0)


def _nonzero(tensor: torch.Tensor) -> torch.Tensor:
    """Count the elements that are not zero, on a device block by block: it makes a byte of each for it there.

    As they lie in memory: of a transposed tensor torch would make a copy.
    """
    elements = flat(tensor)
    if tensor.device.type == "cpu" or tensor.numel() <= DEVICE_BLOCK:
        return torch.count_nonzero(elements)
    return torch.stack([torch.count_nonzero(piece) for piece in torch.split(elements, DEVICE_BLOCK)]).sum()


def _together(pieces: list[tuple[np.ndarray, np.ndarray]]) -> tuple[np.ndarray, np.ndarray]:
    if not pieces:
        return np.zeros(0, dtype=np.int64), np.zeros(0)
    return np.concatenate([which for which, _ in pieces]), np.concatenate([values for _, values in pieces])
