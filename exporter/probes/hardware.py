"""What the rank's GPU says of its health, in the next record after it was read."""

from __future__ import annotations

from trainwarden.exporter.hardware import Hardware as Poller
from trainwarden.exporter.probes.probe import Closing, Probe
from trainwarden.exporter.sheet import Reading
from trainwarden.record import Value


class Hardware(Probe):
    """Signals ``gpu_…``. A reading is told once; between the ranks the newest of each is compared, at regular steps."""

    name = "hardware"

    def __init__(self, poller: Poller) -> None:
        self._poller = poller

    def close(self, closing: Closing) -> None:
        """Find out which GPU it is, in case the model was moved after the exporter was made."""
        if closing.regular:
            self._poller.look(closing.watched.params)
            closing.sheet.host["hardware.compare"] = True

    def signals(self, reading: Reading) -> dict[str, Value]:
        """Return what was read since the record before."""
        self._poller.begin()
        return self._poller.take()

    def compared(self, reading: Reading) -> dict[str, Value]:
        """Return the newest reading at the steps at which all ranks show theirs."""
        return self._poller.newest() if reading.host.get("hardware.compare") else {}
