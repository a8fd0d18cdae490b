"""This rank's own gradient before it is reduced, and the time that this rank itself took for it."""

from __future__ import annotations

import math

from trainwarden.exporter.probes.probe import Probe
from trainwarden.exporter.sheet import Reading
from trainwarden.record import Value


class OwnGradient(Probe):
    """Signals ``rank_grad_norm`` and ``rank_compute_seconds``.

    What :mod:`exporter.hooks.reduction` put down for a module counts once: with several backward passes in a step the last
    one under DDP, which holds all that was accumulated. FSDP2 reduces each pass's part apart, and nothing is known of their sum.
    """

    name = "own_gradient"

    def signals(self, reading: Reading) -> dict[str, Value]:
        """Return the norm of the unscaled gradient and the time in seconds."""
        found: dict[str, Value] = {}
        seconds = reading.host.get("rank.compute")
        if seconds is not None:
            found["rank_compute_seconds"] = float(seconds)
        norms: dict[tuple[str, int], float] = {}
        for source, values in reading.pieces("rank.grad"):
            if source in norms and source[0] == "part":
                return found
            norms[source] = float(values[0])
        if not norms or reading.host.get("rank.grad.unknown"):
            return found
        norm = math.hypot(*norms.values())
        scale = reading.number("loss_scale")
        found["rank_grad_norm"] = norm / scale if scale else norm
        return found
