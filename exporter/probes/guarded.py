"""Which updates the guard left out and why, and the events of when it begins to and ends.

It takes part where a guard was made (:mod:`exporter.guard`), which puts its decisions on the sheet as numbers.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from trainwarden.exporter.notices import log
from trainwarden.exporter.probes.probe import Probe
from trainwarden.exporter.sheet import Reading
from trainwarden.record import Value
from trainwarden.signals import SKIP_CAUSES


class Guarded(Probe):
    """Signals ``guard_skipped_steps`` by cause, and ``skipped`` for a guard's as for a GradScaler's; events ``guard``.

    Of several optimizers, a step counts once where one of their updates was left out. What a GradScaler left out is its own and
    not counted here. ``patience`` skipped steps in a row are told of in an event of their own.
    """

    name = "guarded"

    def __init__(self, patience: int) -> None:
        self._patience = patience
        self._in_a_row = 0
        self._said = False

    def signals(self, reading: Reading) -> dict[str, Value]:
        """Return the step's causes."""
        decisions = [values for _, values in reading.pieces("guard")]
        if not decisions and not reading.skipped:
            return {}
        causes = np.max([values[: len(SKIP_CAUSES)] for values in decisions] or [np.zeros(len(SKIP_CAUSES))], axis=0)
        counted: dict[str, float] = {name: float(value) for name, value in zip(SKIP_CAUSES, causes, strict=True)}
        left_out = any(counted.values())
        if decisions and (left_out or not reading.skipped):
            self._tell(reading, counted, decisions)
        return {"guard_skipped_steps": dict(counted), "skipped": 1.0 if left_out or reading.skipped else 0.0}

    def _tell(self, reading: Reading, counted: dict[str, float], decisions: list[np.ndarray]) -> None:
        events: list[tuple[str, dict[str, Any]]] = reading.host.setdefault("events", [])
        if not any(counted.values()):
            if self._in_a_row:
                says = f"The guard lets updates through again, after {self._in_a_row} left out in a row."
                events.append(("guard", {"skips": False, "in_a_row": self._in_a_row, "says": says}))
            self._in_a_row = 0
            return
        self._in_a_row += 1
        if self._in_a_row not in (1, self._patience):
            return
        cause = next(name for name in SKIP_CAUSES if counted[name])
        decision = max(decisions, key=lambda values: float(values[: len(SKIP_CAUSES)].sum()))
        norm, bound = (float(value) for value in decision[len(SKIP_CAUSES) :])
        why = "is not finite" if cause == "nonfinite" else f"is {norm:.4g}, above {bound:.4g}"
        says = f"The guard left out the update of step {reading.step}: the gradient norm {why}."
        if self._in_a_row > 1:
            says = f"The guard has left out {self._in_a_row} updates in a row up to step {reading.step}: the gradient norm {why}."
        fields = {"skips": True, "cause": cause, "norm": norm, "bound": None if np.isnan(bound) else bound}
        events.append(("guard", {**fields, "in_a_row": self._in_a_row, "says": says}))
        if not self._said or self._in_a_row > 1:
            self._said = True
            log.warning("trainwarden: %s", says)
