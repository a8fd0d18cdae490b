"""The learning rate's factor and ramp: in effect inside the optimizer's step, gone again before a scheduler looks.

A pre-hook multiplies every group's rate, a post-hook puts the very same value back, so that no scheduler, checkpoint or log
meets the multiplied one. A step that raises has its rate put back as well. A step that GradScaler leaves out runs no hook.
"""

from __future__ import annotations

import functools
import types
from dataclasses import dataclass
from typing import Any

import torch


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


class RateHooks:
    """Applies a :class:`Rate` to one optimizer, from global step ``start_step`` on."""

    def __init__(self, optimizer: torch.optim.Optimizer, rate: Rate, start_step: int) -> None:
        self._optimizer = optimizer
        self._rate = rate
        self._step = start_step
        self._is_told = False
        self._kept: list[tuple[dict[str, Any], Any, Any]] = []
        self._handles = [
            optimizer.register_step_pre_hook(self._before),
            optimizer.register_step_post_hook(self._after),
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
        if self._optimizer.step is self._guard:  # else somebody wrapped it in turn, and the guard has nothing to do
            self._optimizer.step = self._wrapped  # type: ignore[method-assign]

    def _before(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        self._put_back()
        multiplier = self._rate.at(self._step)
        if multiplier == 1.0:
            return
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


def _guarded(step: Any, put_back: Any) -> Any:
    @functools.wraps(step)
    def guarded(_: torch.optim.Optimizer, *args: Any, **kwargs: Any) -> Any:
        try:
            return step(*args, **kwargs)
        finally:
            put_back()

    return guarded
