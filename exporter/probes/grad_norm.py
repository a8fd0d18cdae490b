"""Gradient norms before clipping, of the whole model and by group.

Where the trainer clips, the norms were taken inside its own call; here only what no such call covered is measured, just
before the optimizer uses it. Gradients that still carry a loss scale are divided by it, and a step that a GradScaler
skipped has no norm: what overflowed there is the scaled gradient.
"""

from __future__ import annotations

import math

import numpy as np

from trainwarden.exporter.measure import norms
from trainwarden.exporter.probes.probe import Closing, Probe, Shares, Totals, Update
from trainwarden.exporter.sheet import Reading
from trainwarden.exporter.watched import Watched
from trainwarden.record import Value
from trainwarden.signals import GROUPS


class GradNorm(Probe):
    """Signal ``grad_norm`` by group; where ranks hold parts, ``shard_grad_norm`` of this rank's, and the whole from all ranks'."""

    name = "grad_norm"
    summed = ("grad_square", "grad_parts")
    whole = ("grad_norm",)

    def __init__(self, watched: Watched) -> None:
        self._watched = watched

    def before(self, update: Update) -> None:
        """Measure the gradients that the trainer did not measure itself."""
        covered = update.sheet.covered()
        rest = [at for at, index in enumerate(update.indices) if index not in covered]
        if not rest:
            return
        indices = [update.indices[at] for at in rest]
        told = self._watched.told(indices, [update.params[at].grad for at in rest])
        wide = self._watched.reach.wide("grad")
        for which, values in norms([update.gradients[at] for at in rest], indices, wide):
            key = None
            if update.grad_scale is not None:
                key = f"grad_scale.{len(update.sheet.tensors)}"
                update.sheet.add(key, update.grad_scale)
            update.sheet.add("grad_norms", values, (which, key, told))

    def close(self, closing: Closing) -> None:
        """Put down the norms that were taken inside the trainer's clipping."""
        for capture in closing.sheet.captures:
            key = None
            if capture.scale is not None:
                key = f"grad_scale.{len(closing.sheet.tensors)}"
                closing.sheet.add(key, capture.scale)
            for which, values in capture.pieces:
                closing.sheet.add("grad_norms", values, (which, key, capture.told))

    def signals(self, reading: Reading) -> dict[str, Value]:
        """Return the norms, unless the step was skipped."""
        indices, squares, _ = self._squares(reading)
        given = _given(reading)
        if reading.skipped or not len(indices):
            return {} if reading.skipped or not given else {"grad_norm": dict(given)}
        self._watched.reach.saw("grad", np.sqrt(squares), self._watched.sizes_of(indices))
        sums = self._watched.group_sums(indices, squares)
        by_group = {group: root(total) for group, total in sums.items()}
        if not self._watched.split:
            return {"grad_norm": {**by_group, **given}}
        whole: dict[str, Value] = {"grad_norm": dict(given)} if given else {}
        return {"shard_grad_norm": by_group["all"], **whole}

    def shares(self, reading: Reading) -> Shares | None:
        """Return this rank's squares, and that it has some. A gradient that is spread otherwise than its parameter tells nothing."""
        if not self._watched.summable or not reading.complete or reading.host.get("updates") is None:
            return None
        indices, squares, told = self._squares(reading)
        if reading.skipped or not told:
            return None
        return {
            "grad_square": self._watched.group_shares(indices, squares),
            "grad_parts": self._watched.group_sums(indices, self._watched.counts(indices)),
        }

    def joined(self, reading: Reading, totals: Totals) -> dict[str, Value]:
        """Return the norms of the whole gradient."""
        found = {group: root(totals[f"grad_square.{group}"]) for group in GROUPS if totals[f"grad_parts.{group}"] > 0}
        found = {**found, **_given(reading)}
        return {"grad_norm": dict(found)} if found else {}

    def _squares(self, reading: Reading) -> tuple[np.ndarray, np.ndarray, bool]:
        """Return parameters, the squares of their norms without any loss scale, and whether the shares can be told from them."""
        indices, squares, all_told = [np.zeros(0, dtype=np.int64)], [np.zeros(0)], True
        for (which, key, told), values in reading.pieces("grad_norms"):
            scale = 1.0 if key is None else reading.number(key)
            if not scale:
                all_told = False
                continue
            with np.errstate(over="ignore", invalid="ignore"):
                squares.append((values / scale) ** 2)
            indices.append(which)
            all_told = all_told and told
        of_whom, all_squares = np.concatenate(indices), np.concatenate(squares)
        filled = self._watched.sizes_of(of_whom) > 0  # the trainer takes norms of empty ones, too
        return of_whom[filled], all_squares[filled], all_told


def _given(reading: Reading) -> dict[str, float]:
    """Return the norm over all ranks that a trainer took in a way of its own: it is never computed again."""
    total = reading.number("grad_norm.total")
    return {} if total is None else {"all": total}


def root(square: float) -> float:
    """Return the root of a sum of squares; NaN stays NaN."""
    return math.sqrt(square) if square >= 0 else math.nan
