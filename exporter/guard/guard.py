"""The guard of one process: stands where an update begins and ends, and keeps out those that would spoil the model.

Where it cannot do what it was asked to, it raises, when it is made or in the first step: a run that is believed to be guarded and
is not would be worse than one that does not start. Later, what goes wrong in it costs the guard of that step and is said.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from trainwarden.exporter.assembly import Parts
from trainwarden.exporter.copies import mesh_size, opaque
from trainwarden.exporter.exporter import Exporter
from trainwarden.exporter.hooks import clipping, scaler
from trainwarden.exporter.notices import Notices
from trainwarden.exporter.probes.guarded import Guarded
from trainwarden.exporter.watched import is_sharded, local

from .embeddings import shrink, unshrink
from .norms import ClippedNorms, Undecidable
from .undo import Copies, Flag, Undo, undo_of
from .verdict import Bounds, Verdicts

#: Settings of a parameter group that decide on how an update is left out.
_DECIDING = ("fused", "capturable", "differentiable")


class Guard:
    """Leaves out updates that are not finite, and if asked those that are far too large, of all of an exporter's optimizers.

    Example::

        exporter = Exporter(model, optimizer, run="gpt-7b")
        guard = Guard(exporter)                       # that is all: the training loop stays as it is
        guard.shrink_embeddings(alpha=0.1)            # optional

    A skipped update leaves parameters, optimizer state and step counter as they were, to the bit. The decision is made on the
    device from the total norm of the gradient before clipping; nothing waits for it, and no collective is added.

    Args:
        exporter: the exporter of this process.
        limit: a norm above which an update is left out; None for none.
        factor: leave out what is above this multiple of the median of the last accepted norms; None for none.
        window: accepted norms that are remembered. ``factor`` counts once half of them are there.
        patience: updates left out in a row from which that is said loudly, and after which ``factor`` begins anew.
        same_norm: the user's word that the norm that is clipped with is equal on all ranks, where that cannot be told: pipeline stages,
            gradients that are reduced by hand.

    With ``TRAINWARDEN_DISABLE=1``, and where the exporter is off, nothing is guarded, which is said once.

    Raises:
        TypeError, ValueError: an argument is of no use, an optimizer's update cannot be left out, or ranks could decide
            differently. RuntimeError comes from the first step where nothing tells a norm that is equal on all ranks.
    """

    def __init__(
        self,
        exporter: Exporter,
        *,
        limit: float | None = None,
        factor: float | None = None,
        window: int = 128,
        patience: int = 10,
        same_norm: bool = False,
    ) -> None:
        if not isinstance(exporter, Exporter):
            raise TypeError(f"exporter: {type(exporter).__name__} is no trainwarden.exporter.Exporter")
        self._bounds = Bounds(limit, factor, window, patience)
        self._exporter = exporter
        self._model: nn.Module = exporter._model
        self._notices: Notices = exporter._notices
        self._embeddings: dict[str, float] = {}
        optimizers = exporter._optimizers
        self._norms = ClippedNorms(optimizers)
        self._undo: dict[int, Undo] = {id(optimizer): undo_of(optimizer) for optimizer in optimizers}
        #: What each was made for: a state that is loaded later brings the settings that it was saved with.
        self._made_for = {id(optimizer): _settings(optimizer) for optimizer in optimizers}
        self._verdicts = {id(optimizer): Verdicts(self._bounds) for optimizer in optimizers}
        self._first = {id(optimizer): _device(optimizer) for optimizer in optimizers}
        self._refuse_ranks_that_differ(same_norm)
        #: The reasons of this step's other updates, and the step that they are of.
        self._reasons: dict[int, Tensor] = {}
        self._step = 0
        self._entries: dict[int, Any] = {}
        self._began: set[int] = set()
        self._parts: Parts | None = exporter._live()
        if self._parts is None:
            self._notices.say("guard", "the exporter is off, and so is its guard: no update is left out")
            return
        if any(isinstance(door, Guard) for door in self._parts.observer.doors):
            self._parts = None
            raise ValueError("exporter: it has a guard already; remove() that first")
        self._attach(self._parts)

    def _refuse_ranks_that_differ(self, same_norm: bool) -> None:
        """Find out whether gradients are whole on each rank, and refuse where ranks could come to different decisions."""
        world = dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1
        params = [p for one in self._exporter._optimizers for group in one.param_groups for p in group["params"]]
        replicated = any(isinstance(module, DistributedDataParallel) for module in self._model.modules())
        untold = opaque(self._model)
        if untold is not None:
            raise ValueError(f"the guard needs a norm that is the same on all ranks: {untold}")
        self._whole = not any(is_sharded(parameter) for parameter in params) and (world == 1 or replicated)
        self._why_not = "each rank holds a part of the gradient" if world > 1 else "the gradient is a DTensor's"
        if world == 1 or same_norm or replicated:
            return
        sizes = {mesh_size(parameter) for parameter in params}
        if sizes != {world}:
            raise ValueError(
                f"the guard needs a norm that is the same on all {world} ranks, and it cannot be told that this one is: the model is not "
                "in DistributedDataParallel, and not all of its parameters are DTensors of all ranks (pipeline stages? gradients reduced by "
                "hand?). If the norm that is clipped with is reduced over all ranks before, say Guard(..., same_norm=True)"
            )

    def _attach(self, parts: Parts) -> None:
        probe = Guarded(self._bounds.patience)
        parts.observer.join(self, probe)
        parts.recorder.join(probe)
        clipping.listen(self._norms)
        scaler.listen(self._norms)
        self._describe()

    def _describe(self) -> None:
        """Have the start event say what is guarded and how; after it, say so in an event of its own."""
        if self._parts is None:
            return
        how = {type(optimizer).__name__: self._undo[id(optimizer)].how for optimizer in self._exporter._optimizers}
        said = {
            "limit": self._bounds.limit,
            "factor": self._bounds.factor,
            "window": self._bounds.window,
            "patience": self._bounds.patience,
            "how": how,
            "embedding_alpha": dict(self._embeddings),
        }
        self._parts.fields["guard"] = said
        if self._exporter._started:
            self._exporter.event("guard", **said)

    def shrink_embeddings(
        self, model: nn.Module | None = None, alpha: float = 0.1, *, modules: Sequence[nn.Module] | None = None
    ) -> list[str]:
        """Multiply the gradient that comes back into the token embedding from its outputs by ``alpha``; return the names of the modules.

        ``model`` is the exporter's unless given. ``modules`` names other modules that give back embeddings; the default is the
        ``nn.Embedding`` with most rows. The forward pass is the same to the bit, a head that is tied to the embedding has its whole
        gradient. Said twice it holds once, with the later alpha; 1 takes it off. Call it before the first step where the model is
        compiled. It holds also where the exporter is off: it is arithmetic of the model. Source: GLM-130B, arXiv 2210.02414.

        Raises:
            TypeError: ``model`` is no module; a bare ``shrink_embeddings(0.5)`` is told to write ``alpha=0.5``.
            ValueError: ``alpha`` is not within 0 to 1, nothing is an embedding, or a module is not the model's.
        """
        found = shrink(self._model if model is None else model, alpha, modules)
        self._embeddings = {name: kept for name, kept in {**self._embeddings, **found}.items() if kept != 1.0}
        self._describe()
        return list(found)

    def remove(self) -> None:
        """Take guard and shrink off; updates are made as they come from then on, and the record says so."""
        unshrink(self._model)
        self._embeddings = {}
        parts, self._parts = self._parts, None
        if parts is None:
            return
        parts.observer.leave(self)
        self.detach()
        parts.fields["guard"] = None
        if self._exporter._started:
            self._exporter.event("guard", removed=True)

    def detach(self) -> None:
        """Stop to listen. The observer calls it at its own end."""
        clipping.forget(self._norms)
        scaler.forget(self._norms)
        for undo in self._undo.values():
            undo.forget()

    def state_dict(self) -> dict[str, Any]:
        """Return what was learnt of the norms, tensors on their device, to be saved in a checkpoint. Without ``factor`` it is empty."""
        found = [self._verdicts[id(optimizer)].state_dict() for optimizer in self._exporter._optimizers]
        return {"verdicts": found}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take over what :meth:`state_dict` gave. Call it before training: values are moved to their device.

        Raises:
            ValueError: it is of other optimizers or of another window.
        """
        saved = state["verdicts"]
        if len(saved) != len(self._verdicts):
            raise ValueError(f"guard: the state of {len(saved)} optimizers was saved, there are {len(self._verdicts)}")
        for optimizer, one in zip(self._exporter._optimizers, saved, strict=True):
            self._verdicts[id(optimizer)].load_state_dict(one, self._first[id(optimizer)])

    # The observer calls these in the middle of optimizer.step().

    def before(self, optimizer: torch.optim.Optimizer) -> None:
        """Decide, and see to it that the update that begins now is left out if it must be.

        Raises:
            RuntimeError: in the first step: nothing tells a norm that is equal on all ranks.
        """
        if self._parts is None or id(optimizer) not in self._undo:
            return
        if torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing():  # type: ignore[no-untyped-call]
            self._notices.say("guard of a graph", "a CUDA graph of a step is captured: what it replays is not guarded")
            return
        try:
            with torch.no_grad():
                self._decide(self._parts, optimizer)
        except Undecidable as error:
            if id(optimizer) not in self._began:
                raise RuntimeError(
                    f"the guard cannot decide on an update of {type(optimizer).__name__}: {error}"
                ) from None
            self._notices.say("guard", f"an update of {type(optimizer).__name__} was not guarded: {error}")
        except Exception as error:
            self._undo[id(optimizer)].forget()
            self._notices.fault("the guard of an update", error)

    def _decide(self, parts: Parts, optimizer: torch.optim.Optimizer) -> None:
        observer, key = parts.observer, id(optimizer)
        undo = self._undo_for(optimizer)
        undo.forget()
        norm = self._norms.of(optimizer, self._whole, self._why_not)
        self._began.add(key)
        if norm is None:
            return
        if observer.step != self._step or key in self._reasons:
            self._reasons, self._step = {}, observer.step
        others = [reasons.to(norm.device) for reasons in self._reasons.values()]
        other = torch.stack(others).amax(0) if others else None
        passed_over = undo.theirs if isinstance(undo, Flag) else None
        reasons, bound = self._verdicts[key].judge(norm, other, passed_over)
        self._reasons[key] = reasons
        undo.before(reasons.sum() > 0)
        entry = self._entries.pop(key, None)  # of an update that ended with an exception
        observer.sheet.tensors = [one for one in observer.sheet.tensors if one is not entry]
        observer.sheet.add("guard", torch.cat([reasons, torch.stack([norm, bound])]), key)
        self._entries[key] = observer.sheet.tensors[-1]

    def _undo_for(self, optimizer: torch.optim.Optimizer) -> Undo:
        """Return how the update that begins now is left out, which a loaded state or a new parameter group may have changed.

        Raises:
            Undecidable: it can no longer be left out.
        """
        key, settings = id(optimizer), _settings(optimizer)
        if settings != self._made_for[key]:
            self._undo[key].forget()
            try:
                undo = undo_of(optimizer)
            except ValueError as error:
                raise Undecidable(str(error)) from None
            changed = undo.how != self._undo[key].how
            self._undo[key], self._made_for[key] = undo, settings
            if changed:
                self._describe()
        return self._undo[key]

    def after(self, optimizer: torch.optim.Optimizer) -> None:
        """The update was made: put back what it must not have changed."""
        undo = self._undo.get(id(optimizer))
        if undo is None or self._parts is None:
            return
        try:
            with torch.no_grad():
                undo.after()
        except Exception as error:
            self._notices.fault("the guard of an update", error)
        self._entries.pop(id(optimizer), None)
        if isinstance(undo, Copies) and undo.size:
            size = f"{undo.size / 2**20:.1f} MiB" if undo.size >= 2**20 else f"{undo.size} bytes"
            self._notices.say(
                f"copies of {id(optimizer)}",
                f"the guard copies the parameters and the state of {type(optimizer).__name__} for the time of each update, {size} "
                f"on this rank{'; with fused=True it copies nothing' if undo.fusible else ''}",
            )


def _device(optimizer: torch.optim.Optimizer) -> torch.device:
    """Return where the first parameter is."""
    return next((local(p).device for group in optimizer.param_groups for p in group["params"]), torch.device("cpu"))


def _settings(optimizer: torch.optim.Optimizer) -> list[tuple[Any, ...]]:
    """Return what of the parameter groups decides on how an update is left out."""
    return [tuple(group.get(name) for name in _DECIDING) for group in optimizer.param_groups]
