"""The loss that the trainer hands in, as it is; a tensor of several elements counts as its mean."""

from __future__ import annotations

import torch

from trainwarden.exporter.probes.probe import Closing, Probe
from trainwarden.exporter.sheet import Reading
from trainwarden.exporter.watched import local
from trainwarden.record import Value


class Loss(Probe):
    """Signal ``loss``. Across several ranks it is also ``rank_loss``: nothing reduced it here, but where the sheet says so."""

    name = "loss"

    def __init__(self, world_size: int = 1) -> None:
        self._own = world_size > 1

    def close(self, closing: Closing) -> None:
        """Put the loss down."""
        loss = closing.loss
        if isinstance(loss, torch.Tensor):
            value = local(loss)
            closing.sheet.add("loss", value if value.numel() == 1 else value.float().mean())
        elif loss is not None:
            closing.sheet.host["loss"] = float(loss)

    def signals(self, reading: Reading) -> dict[str, Value]:
        """Return the loss."""
        loss = reading.number("loss")
        if loss is None:
            return {}
        own = self._own and not reading.host.get("loss.reduced")
        return {"loss": loss, "rank_loss": loss} if own else {"loss": loss}
