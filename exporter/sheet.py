"""The open step's sheet: what the probes put down while the step runs, and how it is read once it has arrived.

On the training thread a sheet holds tensors that nobody has looked at. On the drain thread a reading holds the same
entries as numbers.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from trainwarden.signals import SKIP_CAUSES

Key = tuple[str, Any]


@dataclass(slots=True, eq=False)
class Capture:
    """Gradient norms taken before clipping, at one call of the trainer's.

    ``indices`` are the watched parameters it covers, ``pieces`` their norms as :func:`exporter.measure.norms` gives
    them. ``total`` is the trainer's own norm and ``max_norm`` the threshold, once it clipped. ``scale`` is the
    loss scale that the gradients still carried at the time, None where they were unscaled. ``told``: they are spread over
    the ranks as their parameters are.
    """

    indices: frozenset[int]
    pieces: list[tuple[np.ndarray, Tensor]]
    total: Tensor | None = None
    max_norm: float | Tensor | None = None
    clipped: bool = False
    scale: Tensor | None = None
    told: bool = True


@dataclass(slots=True)
class Sheet:
    """What one step has put down so far. ``due`` says that the costly probes run in it."""

    due: bool = False
    tensors: list[tuple[str, Any, Tensor]] = field(default_factory=list)
    host: dict[str, Any] = field(default_factory=dict)
    captures: list[Capture] = field(default_factory=list)

    def add(self, name: str, tensor: Tensor, meta: Any = None) -> None:
        """Put down a 0- or 1-dimensional tensor. It must be a fresh one, or never written again before the step closes."""
        self.tensors.append((name, meta, tensor))

    def covered(self) -> frozenset[int]:
        """Return the parameters whose gradient norm was taken before clipping."""
        return frozenset().union(*(capture.indices for capture in self.captures)) if self.captures else frozenset()


@dataclass(slots=True)
class Reading:
    """A closed step as numbers: the drain thread's side of a sheet.

    ``complete`` is False where the values could not be fetched (they were lost, or the tensors hold no data).
    """

    step: int
    due: bool
    host: dict[str, Any]
    values: dict[str, list[tuple[Any, np.ndarray]]] = field(default_factory=dict)
    complete: bool = True

    @property
    def skipped(self) -> bool | None:
        """Whether a GradScaler skipped the update; None where there is none, or it did not say."""
        found = self.values.get("found_inf")
        return None if found is None else any(bool(array[0] > 0) for _, array in found)

    @property
    def skipped_by(self) -> frozenset[Any]:
        """The optimizers, by ``id``, whose updates a GradScaler or a guard skipped."""
        found = [optimizer for optimizer, array in self.values.get("found_inf", ()) if array[0] > 0]
        found += [optimizer for optimizer, array in self.values.get("guard", ()) if array[: len(SKIP_CAUSES)].any()]
        return frozenset(found)

    @property
    def measured(self) -> bool:
        """Whether the costly probes looked at an update of this step and their values are there."""
        return self.due and self.complete and self.host.get("updates") is not None

    def pieces(self, name: str) -> Iterator[tuple[Any, np.ndarray]]:
        """Yield each entry put down under ``name`` with what was said along with it."""
        yield from self.values.get(name, ())

    def number(self, name: str) -> float | None:
        """Return the first number put down under ``name``, on the device or on the host, or None."""
        for _, array in self.values.get(name, ()):
            return float(array[0])
        value = self.host.get(name)
        return None if value is None else float(value)


def scalar(value: Tensor | float | int) -> Tensor | float:
    """Return a trainer's scalar as it can be kept: a detached copy of a tensor, or a float."""
    return value.detach().clone() if isinstance(value, torch.Tensor) else float(value)
