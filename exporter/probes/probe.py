"""What a probe is, and what it is shown."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, TypeAlias

import torch
from torch import Tensor

from trainwarden.exporter.sheet import Reading, Sheet
from trainwarden.exporter.watched import Watched
from trainwarden.record import Value

#: A rank's shares of sums over all ranks: by the sum's name, by group.
Shares: TypeAlias = "Mapping[str, Mapping[str, float]]"
#: The sums over all ranks, by ``NAME.GROUP``.
Totals: TypeAlias = "Mapping[str, float]"


@dataclass(slots=True)
class Update:
    """One optimizer's update: as it is about to be made (``before``), and after it was made.

    ``params``, ``gradients`` (local shards) and ``indices`` run in parallel and leave out parameters without a dense
    gradient. ``grad_scale`` is the loss scale that the gradients still carry before the update (a fused optimizer under a
    GradScaler takes it off itself), None where they carry none.
    """

    optimizer: torch.optim.Optimizer
    sheet: Sheet
    watched: Watched
    params: list[Tensor]
    gradients: list[Tensor]
    indices: list[int]
    grad_scale: Tensor | None = None
    kept: dict[str, Any] = field(default_factory=dict)


@dataclass(slots=True)
class Closing:
    """The end of a step, on the training thread. ``batches`` were handed out for it; ``consumed`` says which samples.

    ``regular``: the costly probes are due by the step's number alone, which all ranks go by alike.
    """

    sheet: Sheet
    watched: Watched
    loss: Tensor | float | None
    consumed: Any = None
    batches: Sequence[Any] = ()
    regular: bool = False


class Probe:
    """The three moments of a step at which a probe may look, and what it makes of it. It overrides what it needs.

    ``costly`` probes are shown an update only in steps that are due. ``of_batches``: it reads the trainer's own batches, which may be
    anything; one that cannot be read costs its step what this probe would have said, and the next one is looked at as ever.
    """

    name: ClassVar[str] = ""
    costly: ClassVar[bool] = False
    of_batches: ClassVar[bool] = False
    #: Names of the sums over all ranks that it takes part in, by parameter group each.
    summed: ClassVar[tuple[str, ...]] = ()
    #: Signals that only those sums make where ranks hold parts of what it measures.
    whole: ClassVar[tuple[str, ...]] = ()

    def before(self, update: Update) -> None:
        """Look at the gradients, just before the optimizer uses them. Training thread."""

    def after(self, update: Update) -> None:
        """Look at parameters and state, just after the update. Training thread."""

    def close(self, closing: Closing) -> None:
        """Look at what the step as a whole brought. Training thread."""

    def signals(self, reading: Reading) -> dict[str, Value]:
        """Return the signals of an arrived step. Drain thread. What was not seen is left out."""
        return {}

    def compared(self, reading: Reading) -> dict[str, Value]:
        """Return further numbers of this rank that are compared with the other ranks' and not in its own record. Drain thread."""
        return {}

    def shares(self, reading: Reading) -> Shares | None:
        """Return this rank's share of each of :attr:`summed`, by group; None where it measured none. Drain thread.

        An element that the ranks split into s parts counts s times: see :mod:`exporter.copies`.
        """
        return None

    def joined(self, reading: Reading, totals: Totals) -> dict[str, Value]:
        """Return the signals that the sums over all ranks make. Drain thread; after :meth:`signals` of a later step, maybe."""
        return {}
