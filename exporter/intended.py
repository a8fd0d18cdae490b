"""The update that an optimizer meant to make, recomputed from its state just after it made it.

From the moments alone, with bias correction, epsilon, decoupled decay, maximize and amsgrad, this is right to a few 1e-7;
leaving out the decay would cost 0.7 %. It is not the difference of the parameters: in pure bf16 that can be 0 where the
moments say 4e-4, and that gap is what ``update_applied_ratio`` is compared with it for. The formulas are those of
torch.optim (adam.py, adamw.py, sgd.py), with the corrections in float64 as its default path has them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from .measure import full_precision
from .watched import local

Group = dict[str, Any]


def is_adam(optimizer: torch.optim.Optimizer) -> bool:
    """Say whether the optimizer updates as torch's Adam or AdamW do."""
    return isinstance(optimizer, torch.optim.Adam | torch.optim.AdamW) and type(optimizer).step in (
        torch.optim.Adam.step,
        torch.optim.AdamW.step,
    )


def is_sgd(optimizer: torch.optim.Optimizer) -> bool:
    """Say whether the optimizer updates as torch's SGD does."""
    return isinstance(optimizer, torch.optim.SGD) and type(optimizer).step is torch.optim.SGD.step


def is_known(optimizer: torch.optim.Optimizer) -> bool:
    """Say whether the intended update of this optimizer can be told from its state."""
    return is_adam(optimizer) or is_sgd(optimizer)


def has_factors(group: Group, steps: Sequence[Any]) -> bool:
    """Say whether rate and step counts can be combined where they are, without a copy between devices."""
    rate = group["lr"]
    places = {step.device for step in steps if isinstance(step, torch.Tensor)}
    return len(places) <= 1 and (not isinstance(rate, torch.Tensor) or places <= {rate.device})


def adam_factors(
    optimizer: torch.optim.Optimizer, group: Group, steps: Sequence[Any]
) -> tuple[Tensor, list[Tensor], Tensor | float]:
    """Return what turns :func:`adam_directions` into updates: (rates, epsilons, decay), the first two by optimizer step count.

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
    return rates, list((group["eps"] * roots).unbind()), decay / (1 - decay)


def _decay(optimizer: torch.optim.Optimizer, group: Group) -> Any:
    """Return lr times the decoupled weight decay, 0.0 where the decay goes through the gradient or is none."""
    decoupled = group.get("decoupled_weight_decay", isinstance(optimizer, torch.optim.AdamW))
    return group["lr"] * group["weight_decay"] if decoupled and group["weight_decay"] else 0.0


def adam_directions(first: list[Tensor], second: list[Tensor], epsilons: list[Tensor]) -> list[Tensor]:
    """Return m / (sqrt(v) + eps * sqrt(c2)) for blocks of the two moments: the update up to its rate, its decay and its sign.

    With u = lr / c1 * m / (sqrt(v) / sqrt(c2) + eps) and decay k = lr * weight_decay, the old parameter is
    (p + u) / (1 - k) and the whole update u + k * old = (u + k * p) / (1 - k), which is rate * direction + decay * p. Its norm
    follows from those of direction and parameter and from their product: no factor has to go through memory.
    """
    directions = list(torch._foreach_sqrt(full_precision(second)))
    for direction, moment, epsilon in zip(directions, full_precision(first), epsilons, strict=True):
        direction.add_(epsilon)
        torch.div(moment, direction, out=direction)
    return directions


def adam_squares(
    directions: np.ndarray, products: np.ndarray, weights: np.ndarray, rates: np.ndarray, decays: np.ndarray
) -> np.ndarray:
    """Return the squared norm of each update from those of direction and parameter and their inner product, parameter by parameter."""
    squares: np.ndarray = rates**2 * directions + 2 * rates * decays * products + decays**2 * weights
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
