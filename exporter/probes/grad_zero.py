"""The share of gradient elements that are exactly zero: underflow, or parts of the model that nothing reaches."""

from __future__ import annotations

import numpy as np
import torch

from trainwarden.exporter.probes.probe import Probe, Update
from trainwarden.exporter.sheet import Reading
from trainwarden.exporter.watched import Watched
from trainwarden.record import Value


class GradZero(Probe):
    """Signal ``grad_zero_ratio`` by group. Scaling and clipping leave zeros where they are."""

    name = "grad_zero"
    costly = True

    def __init__(self, watched: Watched) -> None:
        self._watched = watched

    def before(self, update: Update) -> None:
        """Count the elements that are not zero."""
        counts: dict[torch.device, tuple[list[int], list[torch.Tensor]]] = {}
        for index, gradient in zip(update.indices, update.gradients, strict=True):
            indices, members = counts.setdefault(gradient.device, ([], []))
            indices.append(index)
            members.append(torch.count_nonzero(gradient))
        for indices, members in counts.values():
            update.sheet.add("grad_nonzero", torch.stack(members), np.array(indices, dtype=np.int64))

    def signals(self, reading: Reading) -> dict[str, Value]:
        """Return the shares, unless the step was skipped."""
        pieces = list(reading.pieces("grad_nonzero"))
        if not pieces or reading.skipped:
            return {}
        indices = np.concatenate([which for which, _ in pieces])
        nonzero = self._watched.group_sums(indices, np.concatenate([values for _, values in pieces]))
        sizes = self._watched.group_sizes(indices)
        return {"grad_zero_ratio": {group: 1.0 - nonzero[group] / sizes[group] for group in nonzero}}
