"""How a mixture of experts spreads its tokens, by layer and over all of them: see :mod:`exporter.routers`."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator

from trainwarden.exporter.probes.probe import Probe
from trainwarden.exporter.routers import NUMBERS
from trainwarden.exporter.sheet import Reading
from trainwarden.record import Value


def _mean(values: list[float]) -> float:
    return math.fsum(values) / len(values) if all(map(math.isfinite, values)) else math.nan


#: Signal of each number, and what it is over all layers.
SIGNALS: dict[str, tuple[str, Callable[[list[float]], float]]] = {
    "share_max": ("expert_share_max", max),
    "share_min": ("expert_share_min", min),
    "entropy": ("expert_entropy", min),
    "dead": ("dead_experts", math.fsum),
    "z": ("router_z", max),
    "balance": ("router_aux_loss", _mean),
    "dropped": ("expert_dropped_ratio", _mean),
}


class RouterLoad(Probe):
    """Signals ``expert_share_max``, ``expert_share_min``, ``expert_entropy``, ``dead_experts``, ``router_z``, ``router_aux_loss``
    and ``expert_dropped_ratio`` by block.

    Over all layers: the largest share, the smallest, the smallest entropy, the sum of dead experts, the largest z, the mean of the
    others. The balance loss is the script's own where it was handed in or logged.
    """

    name = "router"

    def signals(self, reading: Reading) -> dict[str, Value]:
        """Return the numbers of each layer that was seen, and ``all``."""
        layers: dict[str, dict[str, float]] = {}
        for number, label, value in (*_measured(reading), *_told(reading)):
            layers.setdefault(number, {})[label] = value
        logged = {*reading.host.get("logged", {}), *(name for name, _ in reading.pieces("logged"))}
        found: dict[str, Value] = {}
        for number, (signal, over_all) in SIGNALS.items():
            by_layer = layers.get(number)
            if by_layer and signal not in logged:
                values = list(by_layer.values())
                whole = math.nan if any(map(math.isnan, values)) else over_all(values)
                found[signal] = {"all": whole, **by_layer}
        return found


def _measured(reading: Reading) -> Iterator[tuple[str, str, float]]:
    for layers, values in reading.pieces("routers"):
        rows: Iterable[list[float]] = (
            [float(value) for value in values[at * len(NUMBERS) : (at + 1) * len(NUMBERS)]] for at in range(len(layers))
        )
        for (label, known), row in zip(layers, rows, strict=True):
            if not math.isnan(row[0]):  # of no token there is no share
                yield from ((name, label, row[at]) for at, name in enumerate(NUMBERS) if name in known)


def _told(reading: Reading) -> Iterator[tuple[str, str, float]]:
    for number, name in (("balance", "routers.loss"), ("dropped", "routers.dropped")):
        for label, values in reading.pieces(name):
            yield number, label, float(values[0])
        for label, value in reading.host.get(name, {}).items():
            yield number, label, value
