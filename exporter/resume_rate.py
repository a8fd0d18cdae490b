"""What multiplies the learning rate: in effect inside the optimizer's step, gone again before a scheduler looks.

A pre-hook multiplies every group's rate, a post-hook puts the very same value back, so that no scheduler, checkpoint or log
meets the multiplied one. A step that raises has its rate put back as well. A step that GradScaler leaves out runs no hook.
A plan may ask for a factor and a ramp at a resume, and for a lower rate of the running attempt: one pair of hooks an optimizer does
for both, since of two pairs each would take the other's rate for the scheduled one.
"""

from __future__ import annotations

import functools
import sys
import types
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from trainwarden.plan import Lowering


@dataclass(frozen=True, slots=True)
class Rate:
    """A factor on the scheduled rate, and a linear ramp up to it over the ``warm_up`` steps after step ``began``.

    The first of these steps has ``factor / warm_up``, the last of them ``factor``.
    """

    factor: float = 1.0
    warm_up: int = 0
    began: int = 0

    @property
    def changes(self) -> bool:
        """Whether any step has another rate than the scheduled one."""
        return self.factor != 1.0 or self.warm_up > 1

    def at(self, step: int) -> float:
        """Return the multiplier at a global step."""
        if self.warm_up <= 0:
            return self.factor
        return self.factor * min(1.0, max(step - self.began, 1) / self.warm_up)


class Rates:
    """All that multiplies the learning rate in one start. ``base`` is what a plan asked at its resume.

    Called on the training thread alone; :meth:`at` from any.
    """

    def __init__(self) -> None:
        self.base = Rate()
        self._lowered: tuple[Lowering, ...] = ()
        self._hooks: list[RateHooks] = []

    @property
    def installed(self) -> bool:
        """Whether any optimizer is hooked."""
        return bool(self._hooks)

    @property
    def multiplied(self) -> int:
        """Optimizer steps so far that were made at another rate than the scheduled one."""
        return sum(hooks.multiplied for hooks in self._hooks)

    def at(self, step: int) -> float:
        """Return what the scheduled rate is multiplied by at a global step; 1 where nobody is hooked to do so."""
        if not self._hooks:
            return 1.0
        multiplier = self.base.at(step)
        for lowering in self._lowered:
            multiplier *= lowering.at(step)
        return multiplier

    def install(self, optimizers: Sequence[torch.optim.Optimizer], step: int) -> None:
        """Hook those of the optimizers that are not hooked yet; ``step`` is the global step that comes next."""
        for optimizer in optimizers:
            if all(optimizer is not hooks.optimizer for hooks in self._hooks):
                self._hooks.append(RateHooks(optimizer, self.at, step))

    def lower(self, lowering: Lowering) -> None:
        """Take a lowering in."""
        self._lowered = (*self._lowered, lowering)

    def let_go(self, lowering: Lowering) -> None:
        """Leave it out again, and the hooks off where they have nothing else to do."""
        self._lowered = tuple(other for other in self._lowered if other is not lowering)
        if not self._lowered and not self.base.changes:
            self.remove()

    def closed(self, step: int) -> None:
        """Tell the hooks that global step ``step`` has ended, so that steps without an optimizer step count, too."""
        for hooks in self._hooks:
            hooks.closed(step)

    def remove(self) -> None:
        """Take the hooks off the optimizers."""
        for hooks in self._hooks:
            hooks.remove()
        self._hooks = []


def has_no_rate(optimizer: torch.optim.Optimizer) -> str | None:
    """Say why an optimizer's learning rate cannot be multiplied, or None."""
    for group in optimizer.param_groups:
        rate = group.get("lr")
        if isinstance(rate, bool) or not isinstance(rate, int | float | torch.Tensor):
            without = "without lr" if rate is None else f"whose lr is a {type(rate).__name__}"
            return f"{type(optimizer).__name__} has a group {without}"
    return None


def unwrapped(given: Sequence[Any] | Any) -> tuple[list[torch.optim.Optimizer], list[str]]:
    """Return the torch optimizers, out of wrappers that keep theirs in ``optimizer`` or ``optim``, and what is none."""
    found: list[torch.optim.Optimizer] = []
    unknown: list[str] = []
    for item in given if isinstance(given, list | tuple) else [given]:
        inner = item
        for _ in range(4):
            if isinstance(inner, torch.optim.Optimizer) and type(inner).__module__.startswith("torch.optim"):
                break
            deeper = getattr(inner, "optimizer", None) or getattr(inner, "optim", None)
            if deeper is None:
                break
            inner = deeper
        if not isinstance(inner, torch.optim.Optimizer):
            unknown.append(f"{type(item).__name__} is no torch optimizer")
        elif all(inner is not other for other in found):
            found.append(inner)
    return found, unknown


class RateHooks:
    """Multiplies the rate of one optimizer, from global step ``start_step`` on. ``multiplier`` is given the step."""

    def __init__(self, optimizer: torch.optim.Optimizer, multiplier: Callable[[int], float], start_step: int) -> None:
        self.optimizer = optimizer
        #: Steps of the optimizer that were made at another rate than the scheduled one.
        self.multiplied = 0
        self._multiplier = multiplier
        self._step = start_step
        self._is_told = False
        self._kept: list[tuple[dict[str, Any], Any, Any]] = []
        self._handles = [
            optimizer.register_step_pre_hook(_outside_graphs(self._before)),
            optimizer.register_step_post_hook(_outside_graphs(self._after)),
            optimizer.register_state_dict_pre_hook(lambda _: self._put_back()),
        ]
        self._wrapped = optimizer.step
        guarded = _guarded(self._wrapped, self._put_back)
        self._guard = types.MethodType(guarded, optimizer)
        optimizer.step = self._guard  # type: ignore[method-assign]  # torch calls no hook where a step raises

    def closed(self, step: int) -> None:
        """Take over the count of global steps: ``step`` has ended."""
        self._is_told = True
        self._step = step + 1

    def remove(self) -> None:
        """Take the hooks off."""
        self._put_back()
        for handle in self._handles:
            handle.remove()
        if self.optimizer.step is self._guard:  # else somebody wrapped it in turn, and the guard has nothing to do
            self.optimizer.step = self._wrapped  # type: ignore[method-assign]

    def _before(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        self._put_back()
        multiplier = self._multiplier(self._step)
        if multiplier == 1.0:
            return
        self.multiplied += 1
        shared: set[int] = set()  # one tensor may be the rate of several groups
        for group in optimizer.param_groups:
            rate = group["lr"]
            if isinstance(rate, torch.Tensor):
                if id(rate) in shared:
                    continue
                shared.add(id(rate))
                # In place: a captured graph reads this very tensor. On its device, so nothing waits for anything.
                self._kept.append((group, rate, rate.detach().clone()))
                rate.mul_(multiplier)
            else:
                lowered = rate * multiplier
                group["lr"] = lowered
                self._kept.append((group, lowered, rate))

    def _after(self, *_: Any) -> None:
        self._put_back()
        if not self._is_told:
            self._step += 1

    def _put_back(self) -> None:
        for group, ours, scheduled in self._kept:
            if group["lr"] is not ours:
                continue  # somebody set another rate meanwhile; it is theirs
            if isinstance(ours, torch.Tensor):
                ours.copy_(scheduled)
            else:
                group["lr"] = scheduled
        self._kept.clear()


def _outside_graphs(hook: Callable[..., None]) -> Callable[..., None]:
    """Keep a hook of a compiled step out of its graphs: a number that changes from step to step would have it compiled anew."""
    dynamo = sys.modules.get("torch._dynamo")  # who has not imported it has compiled nothing
    found: Callable[..., None] = hook if dynamo is None else dynamo.disable(hook)
    return found


def _guarded(step: Any, put_back: Any) -> Any:
    @functools.wraps(step)
    def guarded(_: torch.optim.Optimizer, *args: Any, **kwargs: Any) -> Any:
        try:
            return step(*args, **kwargs)
        finally:
            put_back()

    return guarded
