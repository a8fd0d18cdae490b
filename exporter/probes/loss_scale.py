"""GradScaler's loss scale, its backoffs and the steps it skipped, from tensors that it keeps itself."""

from __future__ import annotations

from trainwarden.exporter.probes.probe import Probe
from trainwarden.exporter.sheet import Reading
from trainwarden.record import Value


class LossScale(Probe):
    """Signals ``loss_scale`` (the one used at the step), ``loss_scale_backoffs`` and ``skipped``.

    The scale is read where the step uses it and again where the step closes, so that a backoff is counted once, in whatever
    order ``scaler.update()`` and ``exporter.step()`` are called.
    """

    name = "loss_scale"

    def __init__(self) -> None:
        self._last: float | None = None

    def signals(self, reading: Reading) -> dict[str, Value]:
        """Return what is known of the scaler; nothing where there is none."""
        used, now = reading.number("loss_scale"), reading.number("loss_scale.now")
        if used is None:
            return {}
        backoffs = 0.0
        for scale in (used, now):
            if scale is not None:
                backoffs += self._last is not None and scale < self._last
                self._last = scale
        found: dict[str, Value] = {"loss_scale": used, "loss_scale_backoffs": backoffs}
        if reading.skipped is not None:
            found["skipped"] = 1.0 if reading.skipped else 0.0
        return found
