"""What really changed: a sample of the parameters before the update, compared with the same elements after it."""

from __future__ import annotations

import math

import numpy as np
import torch
from torch import Tensor

from trainwarden.exporter.measure import foreach_norm, full_precision
from trainwarden.exporter.probes.probe import Probe, Update
from trainwarden.exporter.sheet import Reading
from trainwarden.exporter.watched import Watched, local
from trainwarden.record import Value

#: Elements sampled of each parameter.
SAMPLE = 1024


def sample(tensor: Tensor) -> Tensor:
    """Return at most about :data:`SAMPLE` elements, spread evenly over rows and columns, in float32 or better; a copy."""
    flat = tensor.reshape(-1)
    stride = max(1, flat.numel() // SAMPLE)
    while tensor.ndim > 1 and stride > 1 and math.gcd(stride, tensor.shape[-1]) > 1:
        stride += 1  # a divisor of the row would hit the same columns again and again
    return full_precision([flat[::stride].clone()])[0]


class UpdateApplied(Probe):
    """Signal ``update_applied_ratio`` by group, for any optimizer; zero on a skipped step."""

    name = "update_applied"
    costly = True

    def __init__(self, watched: Watched) -> None:
        self._watched = watched
        self._last_groups: dict[str, float] = {}

    def before(self, update: Update) -> None:
        """Keep a sample."""
        update.kept["sample"] = [sample(local(parameter)) for parameter in update.params]

    def after(self, update: Update) -> None:
        """Take the same sample again."""
        old: list[Tensor] | None = update.kept.pop("sample", None)
        if not old:
            return
        new = [sample(local(parameter)) for parameter in update.params]
        buckets: dict[tuple[torch.device, torch.dtype], list[int]] = {}
        for at, tensor in enumerate(new):
            buckets.setdefault((tensor.device, tensor.dtype), []).append(at)
        for members in buckets.values():
            later = [new[at] for at in members]
            changes = list(torch._foreach_sub(later, [old[at] for at in members]))
            which = np.array([update.indices[at] for at in members], dtype=np.int64)
            sizes = np.array([tensor.numel() for tensor in later], dtype=np.float64)
            update.sheet.add("applied_norms", torch.stack(foreach_norm(changes)), (which, sizes))
            update.sheet.add("applied_weights", torch.stack(foreach_norm(later)), (which, sizes))

    def signals(self, reading: Reading) -> dict[str, Value]:
        """Return the ratio of the two root mean squares, each parameter weighing by its size."""
        changes, weights = self._squares(reading, "applied_norms"), self._squares(reading, "applied_weights")
        if changes:
            self._last_groups = dict.fromkeys(changes, 0.0)
        if reading.skipped and reading.due and self._last_groups:
            return {"update_applied_ratio": dict(self._last_groups)}
        if not changes:
            return {}
        return {
            "update_applied_ratio": {
                group: math.sqrt(changes[group] / weights[group])
                for group in changes
                if weights[group] > 0 and changes[group] >= 0
            }
        }

    def _squares(self, reading: Reading, entry: str) -> dict[str, float]:
        indices, squares = [], []
        for (which, sizes), values in reading.pieces(entry):
            indices.append(which)
            squares.append(values**2 / sizes * self._watched.sizes_of(which))
        return self._watched.group_sums(np.concatenate(indices), np.concatenate(squares)) if indices else {}
