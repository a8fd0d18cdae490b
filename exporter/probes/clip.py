"""How close the trainer's own clipping was: its norm over its threshold, as it used them."""

from __future__ import annotations

import math

import numpy as np
import torch

from trainwarden.exporter.copies import is_full
from trainwarden.exporter.probes.probe import Closing, Probe, Shares, Totals
from trainwarden.exporter.sheet import Reading
from trainwarden.exporter.watched import Watched, local
from trainwarden.record import Value


class Clip(Probe):
    """Signals ``clip_ratio`` (the largest, where the trainer clips several sets) and ``clipped_steps``.

    A norm of the trainer's that is only this rank's part is not used. Where it clips one set, all ranks' parts together are.
    """

    name = "clip"
    summed = ("clip_square",)

    def __init__(self, watched: Watched) -> None:
        self._watched = watched

    def close(self, closing: Closing) -> None:
        """Put down the trainer's total norm with its threshold."""
        clipped = [capture for capture in closing.sheet.captures if capture.clipped and capture.max_norm is not None]
        for capture in clipped:
            total, threshold = capture.total, capture.max_norm
            if total is None:
                continue
            if not is_full(total):
                if len(clipped) == 1 and capture.told and isinstance(threshold, int | float):
                    closing.sheet.host["clip.threshold"] = float(threshold)
                    for which, norms in capture.pieces:
                        closing.sheet.add("clip.norms", norms, which)
            elif isinstance(threshold, torch.Tensor):
                closing.sheet.add("clip", local(total) / local(threshold), 1.0)
            else:
                closing.sheet.add("clip", local(total), threshold)

    def signals(self, reading: Reading) -> dict[str, Value]:
        """Return ratio and count, unless the step was skipped."""
        ratios = [float(values[0]) / threshold for threshold, values in reading.pieces("clip") if threshold]
        return {} if reading.skipped else _signals(ratios)

    def shares(self, reading: Reading) -> Shares | None:
        """Return the squares of this rank's part of what was clipped."""
        pieces = list(reading.pieces("clip.norms"))
        if not self._watched.summable or "clip.threshold" not in reading.host or not reading.complete:
            return None
        indices = np.concatenate([which for which, _ in pieces]) if pieces else np.zeros(0, dtype=np.int64)
        norms = np.concatenate([values for _, values in pieces]) if pieces else np.zeros(0)
        return {"clip_square": self._watched.group_shares(indices, norms**2)}

    def joined(self, reading: Reading, totals: Totals) -> dict[str, Value]:
        """Return ratio and count of what all ranks clipped together."""
        square, threshold = totals["clip_square.all"], reading.host["clip.threshold"]
        if reading.skipped or not threshold:
            return {}
        return _signals([math.sqrt(square) / threshold if square >= 0 else math.nan])


def _signals(ratios: list[float]) -> dict[str, Value]:
    if not ratios:
        return {}
    ratio = max(ratios, key=lambda value: (value != value, value))  # NaN wins: it is what the clipping used
    return {"clip_ratio": ratio, "clipped_steps": 1.0 if ratio > 1 else 0.0}
