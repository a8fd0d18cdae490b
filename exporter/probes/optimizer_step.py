"""The optimizer's own step counter, which a skipped step does not advance and a reset puts back."""

from __future__ import annotations

from typing import Any

import torch

from trainwarden.exporter.probes.probe import Probe, Update
from trainwarden.exporter.sheet import Reading
from trainwarden.exporter.watched import local
from trainwarden.record import Value


class OptimizerStep(Probe):
    """Signal ``optimizer_step``: the counter of the first parameter that has one, else of the first parameter group.

    At every step: it costs one number, and a resume that lost it shows in the first record. Of several optimizers, the first
    to be stepped counts. It is behind the step's number by as many steps as a GradScaler skipped.
    """

    name = "optimizer_step"

    def after(self, update: Update) -> None:
        """Put the counter down."""
        if update.sheet.host.get("optimizer_step") is not None:
            return
        count = _counter(update)
        if isinstance(count, torch.Tensor):
            if local(count).numel() == 1:
                update.sheet.host["optimizer_step"] = True  # there is one, and it is on its way
                update.sheet.add("optimizer_step", local(count).clone())
        elif isinstance(count, int | float):
            update.sheet.host["optimizer_step"] = count

    def signals(self, reading: Reading) -> dict[str, Value]:
        """Return the counter."""
        for _, values in reading.pieces("optimizer_step"):
            return {"optimizer_step": float(values[0])}
        count = reading.host.get("optimizer_step")
        return {} if count is None or count is True else {"optimizer_step": float(count)}


def _counter(update: Update) -> Any:
    """Return the counter as torch's optimizers keep it, by parameter, or as apex and DeepSpeed do, by group; None without one."""
    state = update.optimizer.state
    for parameter in update.params:
        known = state.get(parameter)
        count = known.get("step") if isinstance(known, dict) else None
        if count is not None:
            return count
    return next((group["step"] for group in update.optimizer.param_groups if "step" in group), None)
