"""Which quantities of the step were not finite, told from values that other probes put down.

A gradient that overflowed only because of its loss scale is not counted here but under ``skipped``: that is how a
GradScaler finds its scale. Parameters and optimizer state are seen at the cadence of their own probe.
"""

from __future__ import annotations

import numpy as np

from trainwarden.exporter.insight import insight
from trainwarden.exporter.probes.probe import Probe
from trainwarden.exporter.sheet import Reading
from trainwarden.record import Value

#: Quantity, and the entries that show it.
SEEN_IN = {
    "loss": ("loss",),
    "grad": ("grad_norms", "grad_norm.total"),
    "param": ("weight_norms",),
    "optimizer": ("moment_norms",),
}


class Nonfinite(Probe):
    """Signal ``nonfinite``: 1 for each quantity with a non-finite value in this step, 0 for those seen to be finite."""

    name = "nonfinite"

    def signals(self, reading: Reading) -> dict[str, Value]:
        """Return the quantities that were seen."""
        found: dict[str, Value] = {}
        for quantity, entries in SEEN_IN.items():
            if quantity == "grad" and reading.skipped:
                continue
            arrays = [array for entry in entries for _, array in reading.pieces(entry)]
            value = reading.host.get(quantity)
            if isinstance(value, float):
                arrays.append(np.array([value]))
            if arrays:
                found[quantity] = 0.0 if all(bool(np.isfinite(array).all()) for array in arrays) else 1.0
        finite = insight(reading).finite
        if finite is not None:
            found["activation"] = 0.0 if finite else 1.0
        return {"nonfinite": found} if found else {}
