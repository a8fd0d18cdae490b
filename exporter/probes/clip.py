"""How close the trainer's own clipping was: its norm over its threshold, as it used them."""

from __future__ import annotations

import torch

from trainwarden.exporter.probes.probe import Closing, Probe
from trainwarden.exporter.sheet import Reading
from trainwarden.exporter.watched import is_sharded
from trainwarden.record import Value


class Clip(Probe):
    """Signals ``clip_ratio`` (the largest, where the trainer clips several sets) and ``clipped_steps``."""

    name = "clip"

    def close(self, closing: Closing) -> None:
        """Put down the trainer's total norm with its threshold."""
        for capture in closing.sheet.captures:
            if not capture.clipped or capture.total is None or capture.max_norm is None or is_sharded(capture.total):
                continue
            if isinstance(capture.max_norm, torch.Tensor):
                closing.sheet.add("clip", capture.total / capture.max_norm, 1.0)
            else:
                closing.sheet.add("clip", capture.total, capture.max_norm)

    def signals(self, reading: Reading) -> dict[str, Value]:
        """Return ratio and count, unless the step was skipped."""
        ratios = [float(values[0]) / threshold for threshold, values in reading.pieces("clip") if threshold]
        if not ratios or reading.skipped:
            return {}
        ratio = max(ratios, key=lambda value: (value != value, value))  # NaN wins: it is what the clipping used
        return {"clip_ratio": ratio, "clipped_steps": 1.0 if ratio > 1 else 0.0}
