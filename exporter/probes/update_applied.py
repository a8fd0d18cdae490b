"""What really changed: a sample of the parameters before the update, compared with the same elements after it."""

from __future__ import annotations

import math

import numpy as np
import torch
from torch import Tensor

from trainwarden.exporter.intended import shares
from trainwarden.exporter.measure import flat, foreach_norm, full_precision, segment_sums, segments
from trainwarden.exporter.probes.probe import Probe, Shares, Totals, Update
from trainwarden.exporter.sheet import Reading
from trainwarden.exporter.watched import Watched, as_numbers
from trainwarden.record import Value
from trainwarden.signals import GROUPS

#: Elements sampled of each parameter, fewer where there are so many parameters that all samples would be more than the second.
SAMPLE, SAMPLES = 1024, 2**20


def stride_of(tensor: Tensor, sample: int = SAMPLE) -> int:
    """Return the stride that leaves about ``sample`` elements, spread evenly over rows and columns."""
    stride = -(-tensor.numel() // sample)
    while tensor.ndim > 1 and stride > 1 and math.gcd(stride, tensor.shape[-1]) > 1:
        stride += 1  # a divisor of the row would hit the same columns again and again
    return max(1, stride)


class UpdateApplied(Probe):
    """Signal ``update_applied_ratio`` by group, for any optimizer; zero on a skipped step.

    Where the intended update cannot be told, ``update_share`` comes from the same sample.
    """

    name = "update_applied"
    costly = True
    summed = ("applied_square", "applied_weight")
    whole = ("update_applied_ratio",)

    def __init__(self, watched: Watched) -> None:
        self._watched = watched
        self._last_groups: dict[str, float] = {}
        self._strides: dict[int, int] = {}

    def before(self, update: Update) -> None:
        """Keep a sample."""
        update.kept["sample"] = [self._sample(members) for members in self._buckets(update)]

    def after(self, update: Update) -> None:
        """Take the same sample again and put down how far it moved, parameter by parameter."""
        old: list[Tensor] = update.kept.pop("sample", [])
        for before, members in zip(old, self._buckets(update), strict=True):
            after = self._sample(members)
            sizes = [-(-tensor.numel() // stride) for _, tensor, stride in members]
            which = np.array([index for index, _, _ in members], dtype=np.int64)
            meta = (which, np.array(sizes, dtype=np.float64))
            of = segments(sizes) if after.device.type == "cpu" else None
            for name, values in (("applied_norms", after - before), ("applied_weights", after)):
                update.sheet.add(name, _norms(values, sizes, of), meta)

    def _buckets(self, update: Update) -> list[list[tuple[int, Tensor, int]]]:
        """Return (index, tensor, stride) of the parameters by device and type."""
        buckets: dict[tuple[torch.device, torch.dtype], list[tuple[int, Tensor, int]]] = {}
        for index, parameter in zip(update.indices, update.params, strict=True):
            tensor = as_numbers(parameter)
            stride = self._strides.get(index)
            if stride is None:
                sample = min(SAMPLE, max(1, SAMPLES // len(self._watched)))
                stride = self._strides[index] = stride_of(tensor, sample)
            buckets.setdefault((tensor.device, tensor.dtype), []).append((index, tensor, stride))
        return list(buckets.values())

    def _sample(self, members: list[tuple[int, Tensor, int]]) -> Tensor:
        """Return the samples of some parameters end to end, in float32 or better; a copy."""
        return full_precision([torch.cat([flat(tensor)[::stride] for _, tensor, stride in members])])[0]

    def signals(self, reading: Reading) -> dict[str, Value]:
        """Return the ratio of the two root mean squares, each parameter weighing by its size."""
        if self._watched.split:
            return {}
        which, squares = self._squares(reading, "applied_norms")
        if not len(which):
            return self._ratios(reading, {}, {})
        weights = self._watched.group_sums(*self._squares(reading, "applied_weights"))
        return self._ratios(reading, self._watched.group_sums(which, squares), weights)

    def shares(self, reading: Reading) -> Shares | None:
        """Return this rank's squares of changes and of parameters."""
        if not (self._watched.summable and reading.measured):
            return None
        return {
            "applied_square": self._watched.group_shares(*self._squares(reading, "applied_norms")),
            "applied_weight": self._watched.group_shares(*self._squares(reading, "applied_weights")),
        }

    def joined(self, reading: Reading, totals: Totals) -> dict[str, Value]:
        """Return the ratio over all ranks."""
        present = [group for group in GROUPS if totals[f"applied_weight.{group}"] != 0]
        changes = {group: totals[f"applied_square.{group}"] for group in present}
        return self._ratios(reading, changes, {group: totals[f"applied_weight.{group}"] for group in present})

    def _ratios(self, reading: Reading, changes: dict[str, float], weights: dict[str, float]) -> dict[str, Value]:
        if changes:
            self._last_groups = dict.fromkeys(changes, 0.0)
        elif reading.skipped and reading.due and self._last_groups:
            return {"update_applied_ratio": dict(self._last_groups)}
        else:
            return {}
        found: dict[str, Value] = {
            "update_applied_ratio": {
                group: math.sqrt(changes[group] / weights[group]) if changes[group] >= 0 else math.nan
                for group in changes
                if weights[group] != 0
            }
        }
        portions = shares(changes) if reading.host.get("update_unknown") else {}
        if portions:
            found["update_share"] = dict(portions)
        return found

    def _squares(self, reading: Reading, entry: str) -> tuple[np.ndarray, np.ndarray]:
        indices, squares = [np.zeros(0, dtype=np.int64)], [np.zeros(0)]
        for (which, sizes), values in reading.pieces(entry):
            indices.append(which)
            squares.append(values**2 / sizes * self._watched.sizes_of(which))
        return np.concatenate(indices), np.concatenate(squares)


def _norms(values: Tensor, sizes: list[int], of: Tensor | None) -> Tensor:
    """Return the L2 norms of pieces that lie end to end."""
    if of is None:
        return torch.stack(foreach_norm(list(torch.split(values, sizes))))
    return segment_sums(values.double().square(), sizes, of).sqrt_()
