"""Gradient norms before clipping, of the whole model and by group.

Where the trainer clips, the norms were taken inside its own call; here only what no such call covered is measured, just
before the optimizer uses it. Gradients that still carry a loss scale are divided by it, and a step that a GradScaler
skipped has no norm: what overflowed there is the scaled gradient.
"""

from __future__ import annotations

import math

import numpy as np

from trainwarden.exporter.measure import norms
from trainwarden.exporter.probes.probe import Closing, Probe, Update
from trainwarden.exporter.sheet import Reading
from trainwarden.exporter.watched import Watched, is_sharded
from trainwarden.record import Value


class GradNorm(Probe):
    """Signal ``grad_norm`` by group; under sharding ``rank_grad_norm``, of this rank's shard alone."""

    name = "grad_norm"

    def __init__(self, watched: Watched) -> None:
        self._watched = watched

    def before(self, update: Update) -> None:
        """Measure the gradients that the trainer did not measure itself."""
        covered = update.sheet.covered()
        rest = [at for at, index in enumerate(update.indices) if index not in covered]
        if not rest:
            return
        sharded = any(is_sharded(update.params[at]) for at in rest)
        indices = [update.indices[at] for at in rest]
        for which, values in norms([update.gradients[at] for at in rest], indices):
            key = None
            if update.grad_scale is not None:
                key = f"grad_scale.{len(update.sheet.tensors)}"
                update.sheet.add(key, update.grad_scale)
            update.sheet.add("grad_norms", values, (which, key, sharded))

    def close(self, closing: Closing) -> None:
        """Put down the norms that were taken inside the trainer's clipping."""
        for capture in closing.sheet.captures:
            key = None
            if capture.scale is not None:
                key = f"grad_scale.{len(closing.sheet.tensors)}"
                closing.sheet.add(key, capture.scale)
            for which, values in capture.pieces:
                closing.sheet.add("grad_norms", values, (which, key, capture.sharded))

    def signals(self, reading: Reading) -> dict[str, Value]:
        """Return the norms, unless the step was skipped."""
        if reading.skipped:
            return {}
        indices, squares, sharded = [], [], False
        for (which, key, shard), values in reading.pieces("grad_norms"):
            scale = 1.0 if key is None else reading.number(key)
            if not scale:
                continue
            with np.errstate(over="ignore", invalid="ignore"):
                squares.append((values / scale) ** 2)
            indices.append(which)
            sharded = sharded or shard
        if not indices:
            return {}
        sums = self._watched.group_sums(np.concatenate(indices), np.concatenate(squares))
        by_group = {group: math.sqrt(total) if total >= 0 else math.nan for group, total in sums.items()}
        return {"rank_grad_norm": by_group["all"]} if sharded else {"grad_norm": dict(by_group)}
