"""The numbers that the trainer logged itself while the step was open, under names of its own."""

from __future__ import annotations

from trainwarden.exporter.probes.probe import Probe
from trainwarden.exporter.sheet import Reading
from trainwarden.record import Value


class Logged(Probe):
    """Signals of the user's own: ``logged`` of the sheet's host values, and tensors put down under it with their name."""

    name = "logged"

    def signals(self, reading: Reading) -> dict[str, Value]:
        """Return them by name."""
        found: dict[str, Value] = dict(reading.host.get("logged", {}))
        found.update((name, float(values[0])) for name, values in reading.pieces("logged"))
        return found
