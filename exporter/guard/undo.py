"""How an update that was decided against is left out: before it by a flag that the kernel takes, or after it by putting back.

``nan * 0`` is NaN, so no factor leaves an update out. torch's fused kernels (Adam, AdamW, SGD, Adagrad) take ``found_inf``, the flag
of a GradScaler: if it is 1 they write nothing, and the step counter does not move. That costs nothing. Everywhere else parameters and
state are copied before the update and put back by ``torch.where`` after it: the memory of both, for the time of the update. It is
right where all of the state is in ``optimizer.state``, as tensors beside their parameters; an optimizer of which that is not
known is refused.
"""

from __future__ import annotations

import inspect
from typing import Any, Protocol

import torch
from torch import Tensor

from trainwarden.exporter.watched import local

#: torch's optimizers that keep all they know in tensors of ``state``, most of which are 0 before the first update; what is not.
_KNOWN: dict[str, dict[str, float]] = {
    **{name: {} for name in ("Adam", "AdamW", "RAdam", "Adamax", "RMSprop", "Adadelta", "Adagrad", "SGD")},
    **{name: {} for name in ("Adafactor", "Muon")},
    "NAdam": {"mu_product": 1.0},
}
#: Those of them that count no steps, or count them in a tensor that another setting cannot move: on the host.
_COUNTLESS, _COUNTS_ON_HOST = ("SGD", "Muon"), ("Adagrad", "Adafactor")
#: Those that have a fused kernel.
_FUSED = ("Adam", "AdamW", "SGD", "Adagrad")


class Undo(Protocol):
    """Leaves the update of one optimizer out, or does not."""

    #: How, in one word: ``found_inf`` or ``copies``.
    how: str

    def before(self, left_out: Tensor) -> None:
        """The update is about to be made. ``left_out`` is true, a number on the device, if it must not be."""

    def after(self) -> None:
        """It was made."""

    def forget(self) -> None:
        """An update that was begun has ended with an exception, or nobody guards it any more."""


def undo_of(optimizer: torch.optim.Optimizer) -> Undo:
    """Return how updates of ``optimizer`` are left out.

    Raises:
        ValueError: they cannot be; the message says why and what to do.
    """
    name = type(optimizer).__name__
    kind = _kind(optimizer)
    if kind is None:
        raise ValueError(
            f"the guard cannot leave out an update of {name}: it is not known where it keeps its state. Known are, with torch's own "
            f"step, {', '.join(sorted(_KNOWN))} of torch.optim"
        )
    groups = optimizer.param_groups
    if any(group.get("differentiable") for group in groups):
        raise ValueError(f"the guard cannot leave out an update of {name} with differentiable=True: autograd keeps it")
    fused = {group.get("fused") is True for group in groups}
    if len(fused) > 1:
        raise ValueError(
            f"the guard cannot leave out an update of {name}: some parameter groups are fused and some are not"
        )
    devices = {local(parameter).device for group in groups for parameter in group["params"]}
    if len(devices) > 1 and any(device.type == "cpu" for device in devices):
        raise ValueError(
            f"the guard cannot leave out an update of {name} without waiting: it has parameters on the host and elsewhere"
        )
    if any(group.get("momentum") and group.get("dampening") for group in groups) and not optimizer.state:
        raise ValueError(
            f"the guard cannot leave out the first update of {name} with dampening: the momentum begins as the first gradient, and the "
            "next update would not know that it is the first. Use dampening=0"
        )
    if fused == {True}:
        return Flag(optimizer)
    if not _counts_beside(kind, optimizer):
        raise ValueError(
            f"the guard cannot leave out an update of {name} without waiting for the device: its step counter is on the host. "
            + (
                "Use another one"
                if kind in _COUNTS_ON_HOST
                else f"Make it with {'fused=True or ' * (kind in _FUSED)}capturable=True"
            )
        )
    return Copies(optimizer, _KNOWN[kind], kind in _FUSED)


def _kind(optimizer: torch.optim.Optimizer) -> str | None:
    """Return the name of the class of torch's whose step this optimizer runs, if that is a known one."""
    own = inspect.unwrap(type(optimizer).step)
    for name in _KNOWN:
        kind = getattr(torch.optim, name, None)
        if kind is not None and isinstance(optimizer, kind) and inspect.unwrap(kind.step) is own:
            return name
    return None


def _counts_beside(kind: str, optimizer: torch.optim.Optimizer) -> bool:
    """Say whether everything that counts steps is on the device of its parameter."""
    if kind in _COUNTLESS:
        return True
    return all(
        group.get("capturable") is True or all(local(parameter).device.type == "cpu" for parameter in group["params"])
        for group in optimizer.param_groups
    )


class Flag:
    """Sets ``found_inf`` on a fused optimizer while it steps. Where a GradScaler set it already, either is enough."""

    how = "found_inf"

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self._optimizer: Any = optimizer
        self._ours: Tensor | None = None
        self._theirs: Tensor | None = None
        self._without: list[Tensor] = []

    @property
    def theirs(self) -> Tensor | None:
        """What a GradScaler found, a number above 0 if its gradients overflowed; None without one."""
        found: Tensor | None = getattr(self._optimizer, "found_inf", None)
        return None if found is self._ours else found

    def before(self, left_out: Tensor) -> None:
        """Set the flag."""
        self._theirs = theirs = self.theirs
        flag = left_out
        if theirs is not None:
            flag = flag | (theirs.to(flag.device).reshape(()) > 0)
        self._ours = flag.to(torch.float32)  # the kernels compare it with 1 and take it off the step counter
        self._optimizer.found_inf = self._ours
        state = self._optimizer.state
        self._without = [
            parameter
            for group in self._optimizer.param_groups
            if group.get("momentum")
            for parameter in group["params"]
            if parameter.grad is not None and state.get(parameter, {}).get("momentum_buffer") is None
        ]

    def after(self) -> None:
        """Take it off again."""
        ours = self._ours
        for parameter in self._without:
            # SGD makes room for its momentum and leaves what was in that memory where the kernel writes nothing.
            buffer = self._optimizer.state.get(parameter, {}).get("momentum_buffer")
            if isinstance(buffer, torch.Tensor) and ours is not None:
                _put_back(local(buffer), 0.0, ours.to(local(buffer).device) > 0)
        self.forget()

    def forget(self) -> None:
        """Take the flag off if it is still there."""
        if self._ours is not None and getattr(self._optimizer, "found_inf", None) is self._ours:
            if self._theirs is None:
                del self._optimizer.found_inf
            else:
                self._optimizer.found_inf = self._theirs
        self._ours = self._theirs = None
        self._without = []


class Copies:
    """Keeps parameters and state of an optimizer while it steps, and puts them back. ``initial``: state that does not begin as 0."""

    how = "copies"

    def __init__(self, optimizer: torch.optim.Optimizer, initial: dict[str, float], fusible: bool) -> None:
        #: Whether it could be fused, and nothing would be copied.
        self.fusible = fusible
        self._optimizer = optimizer
        self._initial = initial
        self._left_out: Tensor | None = None
        self._kept: list[tuple[Tensor, Tensor, dict[str, Tensor]]] = []
        #: Bytes that an update's copies take, once there was one.
        self.size = 0

    def before(self, left_out: Tensor) -> None:
        """Copy."""
        self._left_out = left_out
        self._kept = []
        for group in self._optimizer.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    state = self._optimizer.state.get(parameter, {})
                    kept = {name: local(value).clone() for name, value in _tensors(state)}
                    self._kept.append((parameter, local(parameter).detach().clone(), kept))

    def after(self) -> None:
        """Put back, and let go of the copies."""
        if self._left_out is None:
            return
        there: dict[torch.device, Tensor] = {self._left_out.device: self._left_out}
        size = 0
        for parameter, before, kept in self._kept:
            own = local(parameter).detach()
            flag = there.setdefault(own.device, self._left_out.to(own.device))
            _put_back(own, before, flag)
            size += own.numel() * own.element_size()
            for name, value in _tensors(self._optimizer.state.get(parameter, {})):
                mine = local(value)
                _put_back(mine, kept.get(name, self._initial.get(name, 0.0)), flag)
                size += mine.numel() * mine.element_size()
        self.size = size
        self.forget()

    def forget(self) -> None:
        """Let go of the copies."""
        self._left_out = None
        self._kept = []


def _tensors(state: Any) -> list[tuple[str, Tensor]]:
    return [(name, value) for name, value in state.items() if isinstance(value, torch.Tensor)]


def _put_back(tensor: Tensor, before: Tensor | float, left_out: Tensor) -> None:
    """Write what was before into ``tensor`` where the update is left out. Not one bit of it changes else."""
    if not isinstance(before, torch.Tensor):
        before = torch.full((), before, dtype=tensor.dtype, device=tensor.device)
    torch.where(left_out, before, tensor, out=tensor)
