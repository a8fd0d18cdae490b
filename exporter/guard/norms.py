"""The norm by which an update is judged: the trainer's own, taken where it clips, the same number on all ranks.

What the ranks could see differently is not used. Where a gradient is split over ranks (a DTensor), only a norm that was reduced
over all of them counts, as torch does when it takes the norm to clip with. Gradients that each rank has whole (one process, DDP)
can be measured here where nobody clips them.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from trainwarden.exporter.copies import is_full
from trainwarden.exporter.measure import norms
from trainwarden.exporter.watched import local


class Undecidable(Exception):
    """There is no norm that is the same on all ranks; the message says why and what to do."""


@dataclass(slots=True, eq=False)
class _Note:
    """A norm that the trainer clipped with: of which parameters (by ``id``), and the loss scale that was still in it.

    ``total`` is None where it is one rank's part alone. ``used``: the optimizers, by ``id``, that were judged by it. ``seen``: of which
    gradients it is, by the parameter's ``id``, with the number of writes to each until then.
    """

    covers: frozenset[int]
    total: Tensor | None
    scale: Tensor | None = None
    used: set[int] = field(default_factory=set)
    seen: dict[int, tuple[weakref.ref[Tensor], int]] = field(default_factory=dict)
    #: What the same gradients were clipped from before that, without the loss scale.
    before: Tensor | None = None

    def norm(self, total: Tensor) -> Tensor:
        """Return a norm without the loss scale: the first of several clippings saw the gradient as it was."""
        found = _wide(total) if self.scale is None else _wide(total) / _wide(self.scale)
        return found if self.before is None else torch.maximum(found, self.before.to(found.device))

    def was_of(self, parameter: Tensor) -> bool:
        """Say whether it is of the tensor that is a parameter's gradient, whatever was written to it since."""
        return parameter.grad is not None and self.seen[id(parameter)][0]() is parameter.grad

    def is_of(self, parameter: Tensor) -> bool:
        """Say whether a parameter has the gradient yet that this is of: neither a new one nor one that more was added to.

        Clipping writes once, unscaling once more. Who wrote what is not known: a third write may be anything.
        """
        gradient, (_, writes) = parameter.grad, self.seen[id(parameter)]
        return (
            gradient is not None
            and self.was_of(parameter)
            and _writes(gradient) <= writes + 1 + (self.scale is not None)
        )


class ClippedNorms:
    """Listens to clipping and to GradScalers. Training thread."""

    def __init__(self, optimizers: Sequence[torch.optim.Optimizer]) -> None:
        self._optimizers = list(optimizers)
        self._notes: list[_Note] = []

    def total_norm(self, tensors: list[Tensor], each: Tensor | None, total: Tensor, norm_type: float) -> None:
        """Not used: a norm that is taken alone may be of gradients that are not complete yet."""

    def clipping(self, parameters: list[Tensor], max_norm: Any, total: Tensor) -> None:
        """Gradients are about to be clipped by ``total``."""
        covers = frozenset(id(parameter) for parameter in parameters if parameter.grad is not None)
        known = local(total).detach().clone().reshape(()) if is_full(total) else None  # a trainer may go on writing it
        again = [note for note in self._notes if note.covers == covers and not note.used and note.total is not None]
        before = [
            note.norm(note.total)
            for note in again
            if note.total is not None and all(note.is_of(p) for p in parameters if id(p) in covers)
        ]
        self._notes = [note for note in self._notes if not note.covers & covers]
        seen = {
            id(parameter): (weakref.ref(parameter.grad), _writes(parameter.grad))
            for parameter in parameters
            if parameter.grad is not None
        }
        self._notes.append(_Note(covers, known, seen=seen, before=before[0] if before else None))

    def clipping_values(self, parameters: list[Tensor]) -> None:
        """Not used: clamping needs no norm."""

    def unscaling(self, scaler: Any, optimizer: torch.optim.Optimizer) -> None:
        """What was noted of this optimizer so far is of scaled gradients."""
        scale = getattr(scaler, "_scale", None)
        if scale is None or not scaler.is_enabled() or not any(optimizer is one for one in self._optimizers):
            return
        own = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
        for note in self._notes:
            if note.scale is None and not note.used and note.covers & own:
                note.scale = scale.clone()
                if note.before is not None:
                    note.before = note.before / _wide(scale.to(note.before.device)).reshape(())

    def stepping(self, scaler: Any, optimizer: torch.optim.Optimizer) -> None:
        """A scaler steps: gradients that nobody unscaled are still scaled."""
        state = scaler._per_optimizer_states.get(id(optimizer), {}) if scaler.is_enabled() else {}
        if getattr(state.get("stage"), "name", "READY") == "READY":
            self.unscaling(scaler, optimizer)

    def stepped(self, scaler: Any, optimizer: torch.optim.Optimizer) -> None:
        """Not used: what the scaler found is on the optimizer while it steps."""

    def of(self, optimizer: torch.optim.Optimizer, whole: bool, why_not: str) -> Tensor | None:
        """Return the norm of the gradient that ``optimizer`` is about to use, in float64; None where it has no gradient.

        ``whole``: each rank has the same gradients, so that what nobody clipped can be measured here. If not, ``why_not`` begins
        the sentence that says so.

        Raises:
            Undecidable: some of it was not clipped and cannot be measured, or the norm is one rank's part.
        """
        with_gradient = [
            parameter for group in optimizer.param_groups for parameter in group["params"] if parameter.grad is not None
        ]
        own = {id(parameter) for parameter in with_gradient}
        notes = [note for note in self._notes if note.covers & own and id(optimizer) not in note.used]
        covered = frozenset().union(*(note.covers for note in notes)) if notes else frozenset()
        rest = [parameter for parameter in with_gradient if id(parameter) not in covered]
        written: list[_Note] = []
        if whole:
            # A norm of an update that was never made, or of some of its micro-batches, says too little of this one.
            old = [note for note in notes if not all(note.is_of(p) for p in with_gradient if id(p) in note.covers)]
            again = frozenset().union(*(note.covers for note in old)) if old else frozenset()
            rest += [parameter for parameter in with_gradient if id(parameter) in again]
            notes = [note for note in notes if note not in old]
            written = [note for note in old if any(note.was_of(p) for p in with_gradient if id(p) in note.covers)]
        found: list[Tensor] = []
        for note in notes:
            if note.total is None:
                raise Undecidable(
                    f"{why_not}, and the norm that it is clipped with was not reduced over them: give clip_grads_with_norm_ "
                    "the norm's full_tensor()"
                )
            found.append(note.norm(note.total))
            note.used.add(id(optimizer))
        if rest and not whole:
            raise Undecidable(
                f"{why_not}, and {len(rest)} of the {len(with_gradient)} parameters of {type(optimizer).__name__} with a gradient "
                "were not clipped before its step. Clip all of them together with torch.nn.utils.clip_grad_norm_ "
                '(max_norm float("inf") takes the norm and changes nothing)'
            )
        found += _measured(rest, getattr(optimizer, "grad_scale", None))
        if not found:
            return None
        first = found[0].device
        together = found[0]
        if len(found) > 1:
            together = torch.linalg.vector_norm(torch.stack([norm.to(first) for norm in found]))
        for note in written:  # clipped, and then written to by hand: what was there before the clipping counts too
            note.used.add(id(optimizer))
            if note.total is not None:
                together = torch.maximum(together, note.norm(note.total).to(first))
        return together


def _measured(parameters: Sequence[Tensor], scale: Tensor | None) -> list[Tensor]:
    """Return the norms of gradients, one for each device and type; ``scale`` is the loss scale that is still in them."""
    gradients = [local(parameter.grad) for parameter in parameters if parameter.grad is not None]
    if any(gradient.layout is not torch.strided for gradient in gradients):
        raise Undecidable("a gradient is sparse, and its norm is not known without waiting for it")
    gradients = [gradient for gradient in gradients if gradient.numel()]
    found = []
    for _, each in norms(gradients, range(len(gradients))):
        norm = torch.linalg.vector_norm(_wide(each))
        found.append(norm if scale is None else norm / _wide(scale.to(norm.device)).reshape(()))
    return found


def _wide(number: Tensor) -> Tensor:
    """Return a number in float64, where the device has it."""
    return number.to(torch.float32 if number.device.type == "mps" else torch.float64)


def _writes(gradient: Tensor) -> int:
    """Return how often a tensor was written to; 0 where torch does not count."""
    return 0 if gradient.is_inference() else gradient._version
