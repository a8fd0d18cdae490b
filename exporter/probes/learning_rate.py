"""The learning rate in effect at the step, a resumed run's factor included, and Adam's beta2."""

from __future__ import annotations

import torch

from trainwarden.exporter.probes.probe import Closing, Probe, Update
from trainwarden.exporter.sheet import Reading, Sheet, scalar
from trainwarden.record import Value

Rates = list[tuple[str, "torch.Tensor | float"]]


def rates(optimizer: torch.optim.Optimizer) -> Rates:
    """Return name and rate of each parameter group as they are now: its ``name`` where it has one, else its number."""
    return [
        (str(group.get("name", number)), scalar(group["lr"]))
        for number, group in enumerate(optimizer.param_groups)
        if "lr" in group
    ]


class LearningRate(Probe):
    """Signals ``lr`` (``all`` is the largest) and ``beta2``.

    The rate is read after the update and before a scheduler moves it. A step that was skipped without the optimizer being
    called has the rate that it would have used: nominal times ``factor``.
    """

    name = "learning_rate"

    def __init__(self, optimizers: list[torch.optim.Optimizer]) -> None:
        self._optimizers = optimizers

    def after(self, update: Update) -> None:
        """Read the rates in effect."""
        self._put(update.sheet, self._optimizers.index(update.optimizer), rates(update.optimizer), 1.0)

    def close(self, closing: Closing) -> None:
        """Fall back on the nominal rates, and read beta2."""
        seen = closing.sheet.host.get("lr.seen", ())
        unseen = closing.sheet.host.pop("lr.nominal", {})
        if seen or unseen:  # of several optimizers, one that makes no step now has its rate all the same
            unseen = {number: rates(optimizer) for number, optimizer in enumerate(self._optimizers)} | unseen
        for number, nominal in unseen.items():
            if number not in seen:
                self._put(closing.sheet, number, nominal, closing.sheet.host.get("lr.factor", 1.0))
        for optimizer in self._optimizers:
            for group in optimizer.param_groups:
                if "betas" in group:
                    beta2 = group["betas"][1]
                    if isinstance(beta2, torch.Tensor):
                        closing.sheet.add("beta2", beta2.detach().clone())
                    else:
                        closing.sheet.host["beta2"] = beta2
                    return

    def _put(self, sheet: Sheet, number: int, values: Rates, factor: float) -> None:
        sheet.host["lr.seen"] = (*sheet.host.get("lr.seen", ()), number)
        prefix = f"{number}." if len(self._optimizers) > 1 else ""
        for name, value in values:
            if isinstance(value, torch.Tensor):
                sheet.add("lr", value, (prefix + name, factor))
            else:
                sheet.host.setdefault("lr", {})[prefix + name] = value * factor

    def signals(self, reading: Reading) -> dict[str, Value]:
        """Return the rates by parameter group; a single group is a bare number."""
        found: dict[str, Value] = {}
        groups: dict[str, float] = dict(reading.host.get("lr", {}))
        groups.update({name: float(values[0]) * factor for (name, factor), values in reading.pieces("lr")})
        if len(groups) == 1 and len(self._optimizers) == 1:
            found["lr"] = next(iter(groups.values()))
        elif groups:
            found["lr"] = {"all": max(groups.values()), **groups}
        beta2 = reading.number("beta2")
        if beta2 is not None:
            found["beta2"] = beta2
        return found
