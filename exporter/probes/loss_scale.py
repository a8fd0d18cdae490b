"""GradScaler's loss scale, its backoffs and the steps it skipped, from tensors that it keeps itself."""

from __future__ import annotations

from typing import Any

from trainwarden.exporter.probes.probe import Probe
from trainwarden.exporter.sheet import Reading
from trainwarden.record import Value


class LossScale(Probe):
    """Signals ``loss_scale`` (the one used at the step), ``loss_scale_backoffs`` and ``skipped``.

    The scale is read where the step uses it and again where the step closes, so that a backoff is counted once, in whatever
    order ``scaler.update()`` and ``exporter.step()`` are called. Of several scalers the smallest scale is told, and the backoffs of
    all; a step counts as skipped where one of several optimizers was skipped.
    """

    name = "loss_scale"

    def __init__(self) -> None:
        self._last: dict[Any, float] = {}

    def signals(self, reading: Reading) -> dict[str, Value]:
        """Return what is known of the scaler; nothing where there is none."""
        used = [float(values[0]) for _, values in reading.pieces("loss_scale")]
        if not used:
            return {}
        backoffs = 0.0
        for entry in ("loss_scale", "loss_scale.now"):
            for scaler, values in reading.pieces(entry):
                scale = float(values[0])
                backoffs += scale < self._last.get(scaler, scale)
                self._last[scaler] = scale
        found: dict[str, Value] = {"loss_scale": min(used), "loss_scale_backoffs": backoffs}
        if reading.skipped is not None:
            found["skipped"] = 1.0 if reading.skipped else 0.0
        return found
