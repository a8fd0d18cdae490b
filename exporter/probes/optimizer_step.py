"""The optimizer's own step counter, which a skipped step does not advance and a reset puts back."""

from __future__ import annotations

import torch

from trainwarden.exporter.probes.probe import Probe, Update
from trainwarden.exporter.sheet import Reading
from trainwarden.exporter.watched import local
from trainwarden.record import Value


class OptimizerStep(Probe):
    """Signal ``optimizer_step``: the counter of the first parameter that has one."""

    name = "optimizer_step"
    costly = True

    def after(self, update: Update) -> None:
        """Put the counter down."""
        for parameter in update.params:
            count = update.optimizer.state.get(parameter, {}).get("step")
            if isinstance(count, torch.Tensor):
                update.sheet.add("optimizer_step", local(count).clone())
                return
            if count is not None:
                update.sheet.host["optimizer_step"] = count
                return

    def signals(self, reading: Reading) -> dict[str, Value]:
        """Return the counter."""
        count = reading.number("optimizer_step")
        return {} if count is None else {"optimizer_step": count}
