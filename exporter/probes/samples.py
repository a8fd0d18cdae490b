"""Which samples the step consumed, as the watched loader counts them."""

from __future__ import annotations

from trainwarden.exporter.probes.probe import Closing, Probe
from trainwarden.exporter.sheet import Reading
from trainwarden.record import Value


class Samples(Probe):
    """Signals ``sample_position``, ``epoch`` and ``substituted_samples``; ranges and shards of the record."""

    name = "samples"

    def close(self, closing: Closing) -> None:
        """Keep what the loader says. These are numbers of the host."""
        consumed = closing.consumed
        if consumed is None:
            return
        host = closing.sheet.host
        host["samples"] = consumed.count
        host["ranges"] = [(int(first), int(end)) for first, end in consumed.samples]
        host["shards"] = list(consumed.shards)
        host["epoch"] = consumed.epoch
        host["position"] = consumed.position
        host["substituted"] = consumed.substituted

    def signals(self, reading: Reading) -> dict[str, Value]:
        """Return position and epoch; the recorder adds the running totals."""
        host = reading.host
        found: dict[str, Value] = {}
        if host.get("position") is not None:
            found["sample_position"] = float(host["position"])
        if host.get("epoch") is not None:
            found["epoch"] = float(host["epoch"])
        if host.get("can_substitute"):
            found["substituted_samples"] = float(host.get("substituted") or 0)
        return found
