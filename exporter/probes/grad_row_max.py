"""The largest row of the gradient of token and position embeddings: one token that pulls hard is lost in a norm over all of them."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from trainwarden.exporter.measure import accumulation
from trainwarden.exporter.probes.probe import Probe, Update
from trainwarden.exporter.sheet import Capture, Reading
from trainwarden.exporter.tables import table_of
from trainwarden.exporter.watched import Watched, is_sharded
from trainwarden.record import Value

#: What torch adds to a norm before it divides by it, when it clips.
EPSILON = 1e-6


class GradRowMax(Probe):
    """Signal ``grad_row_max`` by table, of this rank's rows. Where the trainer clips, the clipping is taken out again.

    A table that is tied to the head has the gradients of both. Of one that is split over its columns no row is whole: it is left out.
    """

    name = "grad_row_max"
    costly = True

    def __init__(self, watched: Watched) -> None:
        self._watched = watched

    def before(self, update: Update) -> None:
        """Take the norm of each row of each table."""
        for at, index in enumerate(update.indices):
            if self._watched.group(index) != "embedding" or update.gradients[at].ndim != 2:
                continue
            whole = update.params[at]
            if is_sharded(whole) and update.gradients[at].shape[-1] != whole.shape[-1]:
                continue
            gradient = update.gradients[at]
            largest = torch.linalg.vector_norm(gradient, dim=1, dtype=accumulation(gradient)).amax()
            for capture in update.sheet.captures:
                largest = _unclipped(largest, capture, index)
            if update.grad_scale is not None:
                largest = largest / update.grad_scale
            table = table_of(self._watched, index)
            update.sheet.add("grad_row", largest, table)

    def signals(self, reading: Reading) -> dict[str, Value]:
        """Return the largest row of each table, unless the step was skipped."""
        found: dict[str, Value] = {}
        if not reading.skipped:
            for table, value in _values(reading):
                known = found.get(table)
                found[table] = value if not isinstance(known, float) or not value <= known else known
        return {"grad_row_max": found} if found else {}


def _values(reading: Reading) -> Iterator[tuple[str, float]]:
    for table, values in reading.pieces("grad_row"):
        yield table, float(values[0])


def _unclipped(norm: Tensor, capture: Capture, index: int) -> Tensor:
    """Return what a norm was before the trainer clipped the gradient that it is of; scaling it again takes nothing from NaN."""
    if not capture.clipped or index not in capture.indices or capture.total is None or capture.max_norm is None:
        return norm
    if is_sharded(capture.total) or capture.total.device != norm.device:
        return norm
    return norm * ((capture.total + EPSILON) / capture.max_norm).clamp(min=1.0)
