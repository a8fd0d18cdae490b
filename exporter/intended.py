"""The update that an optimizer meant to make, recomputed from its state just after it made it.

From the moments alone, with bias correction, epsilon, decoupled decay, maximize and amsgrad, this is right to a few 1e-7;
leaving out the decay would cost 0.7 %. It is not the difference of the parameters: in pure bf16 that can be 0 where the
moments say 4e-4, and that gap is what ``update_applied_ratio`` is compared with it for. The formulas are those of
torch.optim (adam.py, adamw.py, sgd.py), with the corrections in float64 as its default path has them.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from trainwarden.signals import MOMENTS

from .measure import full_precision
from .watched import local

Group = dict[str, Any]
#: What the states called ``exp_avg`` and ``exp_avg_sq`` are the moments of the gradient in. Not in Adafactor of transformers, where
#: the first averages updates.
_MOMENTS: tuple[tuple[type[torch.optim.Optimizer], tuple[str, ...]], ...] = (
    (torch.optim.Adam, MOMENTS),
    (torch.optim.AdamW, MOMENTS),
    (torch.optim.NAdam, MOMENTS),
    (torch.optim.RAdam, MOMENTS),
    (torch.optim.SparseAdam, MOMENTS),
    (torch.optim.Adamax, MOMENTS[:1]),
)


def is_adam(optimizer: torch.optim.Optimizer) -> bool:
    """Say whether the optimizer updates as torch's Adam or AdamW do."""
    return _steps_as(optimizer, torch.optim.Adam) or _steps_as(optimizer, torch.optim.AdamW)


def is_sgd(optimizer: torch.optim.Optimizer) -> bool:
    """Say whether the optimizer updates as torch's SGD does."""
    return _steps_as(optimizer, torch.optim.SGD)


def _steps_as(optimizer: torch.optim.Optimizer, kind: type[torch.optim.Optimizer]) -> bool:
    """Say whether an optimizer's step is that of a class of torch's, which wraps it once in each class that is made use of."""
    return isinstance(optimizer, kind) and inspect.unwrap(type(optimizer).step) is inspect.unwrap(kind.step)


def is_known(optimizer: torch.optim.Optimizer) -> bool:
    """Say whether the intended update of this optimizer can be told from its state."""
    return is_adam(optimizer) or is_sgd(optimizer)


def moments_of(optimizer: torch.optim.Optimizer, states: Sequence[Any]) -> tuple[str, ...]:
    """Return the names of the states that are moments of the gradient. ``states`` are those of some parameters.

    Of an optimizer that is not torch's, both are taken at their word where every parameter has both: an optimizer that keeps rows and
    columns, or one average alone, means something else by the names.
    """
    for kind, names in _MOMENTS:
        if isinstance(optimizer, kind):
            return names
    return MOMENTS if states and all(moment in state for state in states for moment in MOMENTS) else ()


def has_factors(group: Group, steps: Sequence[Any]) -> bool:
    """Say whether rate and step counts can be combined where they are, without a copy between devices."""
    places = {step.device for step in steps if isinstance(step, torch.Tensor)}
    factors = [factor for factor in (group["lr"], *group["betas"]) if isinstance(factor, torch.Tensor)]
    return len(places) <= 1 and all(places <= {factor.device} for factor in factors)


def adam_factors(
    optimizer: torch.optim.Optimizer, group: Group, steps: Sequence[Any]
) -> tuple[Tensor, Tensor, Tensor | float]:
    """Return what turns :func:`adam_directions` into updates: (rates, epsilons, decay), the first two 1-D, by optimizer step count.

    With c1 and c2 the bias corrections and k = lr * weight_decay, a rate (float64) is lr * sqrt(c2) / c1 / (1 - k), an epsilon
    eps * sqrt(c2) and the decay k / (1 - k). A parameter's size after the update is what is there; the division by 1 - k
    undoes the decay that led to it.
    """
    if all(isinstance(step, torch.Tensor) for step in steps):
        counts = torch.stack([local(step) for step in steps])
    else:
        counts = torch.tensor([float(step) for step in steps])
    if counts.device.type != "mps":
        counts = counts.to(torch.float64)
    beta1, beta2 = group["betas"]
    decay = _decay(optimizer, group)
    roots = (1 - beta2**counts).sqrt()
    rates = group["lr"] * roots / ((1 - beta1**counts) * (1 - decay))
    return rates, group["eps"] * roots, decay / (1 - decay)


def _decay(optimizer: torch.optim.Optimizer, group: Group) -> Any:
    """Return lr times the decoupled weight decay, 0.0 where the decay goes through the gradient or is none."""
    decoupled = group.get("decoupled_weight_decay", isinstance(optimizer, torch.optim.AdamW))
    return group["lr"] * group["weight_decay"] if decoupled and group["weight_decay"] else 0.0


def adam_directions(
    first: list[Tensor], second: list[Tensor], epsilons: list[Tensor], scratch: Tensor | None = None
) -> list[Tensor]:
    """Return m / (sqrt(v) + eps * sqrt(c2)) for blocks of the two moments: the update up to its rate, its decay and its sign.

    With u = lr / c1 * m / (sqrt(v) / sqrt(c2) + eps) and decay k = lr * weight_decay, the old parameter is
    (p + u) / (1 - k) and the whole update u + k * old = (u + k * p) / (1 - k), which is rate * direction + decay * p. Its norm
    follows from those of direction and parameter and from their product: no factor has to go through memory. The direction of a single
    block is made in ``scratch`` where that is given and of its type: memory that is new for each block costs more than the roots.
    """
    directions = _roots(second, scratch)
    for direction, moment, epsilon in zip(directions, full_precision(first), epsilons, strict=True):
        direction.add_(epsilon)
        torch.div(moment, direction, out=direction)
    return directions


def _roots(tensors: list[Tensor], scratch: Tensor | None) -> list[Tensor]:
    """Return square roots in float32 or better; a tensor that had to be copied for it is not copied twice."""
    if scratch is not None and len(tensors) == 1 and tensors[0].dtype is scratch.dtype:
        out = scratch[: tensors[0].numel()]
        return [torch.sqrt(tensors[0], out=out)]
    wide = full_precision(tensors)
    if any(copy is tensor for copy, tensor in zip(wide, tensors, strict=True)):
        return list(torch._foreach_sqrt(wide))
    torch._foreach_sqrt_(wide)
    return wide


def adam_squares(
    directions: np.ndarray, products: np.ndarray, weights: np.ndarray, rates: np.ndarray, decays: np.ndarray
) -> np.ndarray:
    """Return the squared norm of each update from those of direction and parameter and their inner product, parameter by parameter."""
    decayed = 2 * rates * decays * products + decays**2 * weights
    squares: np.ndarray = rates**2 * directions
    squares += np.where(decays == 0, 0.0, decayed)  # without decay it does not matter what the parameter has become
    return np.where(squares < 0, 0.0, squares)  # rounding; NaN stays NaN


def sgd_update(
    group: Group, params: list[Tensor], gradients: list[Tensor], buffers: list[Tensor] | None
) -> list[Tensor]:
    """Return the size of SGD's update of each of ``params`` (blocks, as they are after it), up to its sign.

    ``gradients`` are those it used. Weight decay acts on the old parameter p + lr * d, hence the division.
    """
    rate, decay, momentum = group["lr"], group["weight_decay"], group["momentum"]
    if buffers is not None and not group["nesterov"]:
        return list(torch._foreach_mul(full_precision(buffers), rate))
    sign = -1.0 if group["maximize"] else 1.0
    directions = torch._foreach_mul(full_precision(gradients), sign)
    if buffers is not None:
        torch._foreach_add_(directions, torch._foreach_mul(full_precision(buffers), momentum))
    if decay:
        torch._foreach_add_(directions, torch._foreach_mul(full_precision(params), decay))
    return list(torch._foreach_mul(directions, rate / (1 - decay * rate)))


def shares(squares: Mapping[str, float]) -> dict[str, float]:
    """Return each group's share of the squared norm of an update, and as ``all`` the largest of them; nothing of no update."""
    whole = squares.get("all", 0.0)
    if whole == 0:
        return {}
    found = {
        group: square / whole if whole < math.inf else math.nan for group, square in squares.items() if group != "all"
    }
    return {"all": max(found.values(), key=lambda share: (share != share, share)), **found} if found else {}
