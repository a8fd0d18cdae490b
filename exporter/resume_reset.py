"""Resets an optimizer: both moments, amsgrad's maximum, master state and the step counter, all or nothing.

Zeroing the moments and keeping the step counter makes Adam's first updates about three times the learning rate,
(1 - beta1) / sqrt(1 - beta2) for 0.9 and 0.999: the bias correction believes that the moments are full. Cleared together with
the counter, the first update is one learning rate an element (measured; design, exporter facts). That is still several times a
usual update, which is why a reset has a floor under its re-warm-up.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Sequence

import torch

#: torch's optimizers that build their state at the first step that finds none, so that clearing it is a fresh start.
_NAMES = (
    *("Adam", "AdamW", "NAdam", "RAdam", "Adamax", "SparseAdam", "Adadelta"),
    *("RMSprop", "Rprop", "ASGD", "SGD", "LBFGS", "Adafactor", "Muon"),
)
_LAZY = tuple(getattr(torch.optim, name) for name in _NAMES if hasattr(torch.optim, name))
#: State of Adam-like optimizers that is zero at the beginning.
_ZERO_AT_START = frozenset({"step", "exp_avg", "exp_avg_sq", "max_exp_avg_sq", "momentum_buffer"})
#: Copies of the parameters in a higher precision; they begin as the parameters.
_MASTER = frozenset({"master_param", "master_params", "master_weight"})


def warm_up_floor(optimizers: Sequence[torch.optim.Optimizer]) -> int:
    """Return the fewest steps over which the rate must rise after a reset: one memory of the first moment, 1/(1 - beta1).

    10 for Adam's usual beta1 of 0.9. Until then the first moment averages fewer gradients than usual, and updates
    are up to one learning rate for every element.
    """
    betas = [
        float(group["betas"][0]) if "betas" in group else float(group.get("momentum") or 0.0)
        for optimizer in optimizers
        for group in optimizer.param_groups
    ]
    largest = min(max(betas, default=0.0), 0.99)
    return math.ceil(round(1 / (1 - largest), 6)) if largest > 0 else 0


def cannot_reset(optimizer: torch.optim.Optimizer) -> str | None:
    """Say why an optimizer cannot be reset, or None. Changes nothing."""
    name = type(optimizer).__name__
    if isinstance(optimizer, torch.optim.Adagrad) or _is_lazy(optimizer):
        return None
    keys = {key for state in optimizer.state.values() if isinstance(state, dict) for key in state}
    strange = keys - _ZERO_AT_START - _MASTER
    if strange:
        return f"{name} is not known: nobody can say what {', '.join(sorted(map(str, strange)))} begin with"
    return None if keys else f"{name} is not known and has no state to judge it by"


def reset(optimizer: torch.optim.Optimizer) -> None:
    """Reset an optimizer for which :func:`cannot_reset` is None."""
    if isinstance(optimizer, torch.optim.Adagrad):
        start = float(optimizer.defaults["initial_accumulator_value"])
        for state in optimizer.state.values():
            state["sum"].fill_(start)
            state["step"].zero_()
    elif _is_lazy(optimizer):
        optimizer.state.clear()
    else:
        _zero(optimizer)
    for group in optimizer.param_groups:  # apex keeps the counter here
        if isinstance(group.get("step"), torch.Tensor):
            group["step"].zero_()
        elif "step" in group:
            group["step"] = 0


def _is_lazy(optimizer: torch.optim.Optimizer) -> bool:
    """Say whether the optimizer runs the step of one of torch's own that rebuild their state."""
    own = inspect.unwrap(type(optimizer).step)
    return any(isinstance(optimizer, kind) and own is inspect.unwrap(kind.step) for kind in _LAZY)


def _zero(optimizer: torch.optim.Optimizer) -> None:
    for parameter, state in optimizer.state.items():
        for name, value in state.items():
            if name in _MASTER:
                value.detach().copy_(parameter.detach())
            elif isinstance(value, torch.Tensor):
                value.detach().zero_()
            elif value is not None:
                state[name] = type(value)(0)
