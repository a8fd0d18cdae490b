"""Modules with a fault that can be switched on, and the line of each: what a close look must name."""

from __future__ import annotations

import inspect
import math
import sys
from pathlib import Path
from typing import Any

import torch
from torch import nn

from tests.exporter.gpt import GPT, gpt


def forget_compiled() -> None:
    """Let nothing count as compiled that another test in this process has compiled: operations are not seen beside that."""
    dynamo = sys.modules.get("torch._dynamo")
    if dynamo is not None and hasattr(dynamo, "reset"):
        dynamo.reset()


class Faulty(nn.Module):
    """Around a module of a model: gives back what it gives, and the fault's share of it while ``on``."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner
        self.on = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.inner(x)
        return found + self.fault(found) if self.on else found

    def fault(self, x: torch.Tensor) -> torch.Tensor:
        raise NotImplementedError


class LogOfNegative(Faulty):
    """NaN in the forward pass."""

    def fault(self, x: torch.Tensor) -> torch.Tensor:
        below = -1.0 - x.abs()
        return torch.log(below)  # here


class RootAtZero(Faulty):
    """The gradient of a square root is infinite at 0; the forward pass is finite."""

    def fault(self, x: torch.Tensor) -> torch.Tensor:
        zero = x * 0.0
        return torch.sqrt(zero)  # here


class InfinityTimesNothing(Faulty):
    """What a mask throws away forward, exp gives back as 0 times infinity: NaN in the backward pass alone."""

    def fault(self, x: torch.Tensor) -> torch.Tensor:
        large = x + 1000.0
        grown = torch.exp(large)  # here
        return torch.where(large > 50.0, torch.zeros_like(x), grown)


class Masked(Faulty):
    """Infinities that do no harm: a mask's, and those of a logarithm of it, gone behind the softmax."""

    def fault(self, x: torch.Tensor) -> torch.Tensor:
        keep = (torch.arange(x.shape[-1]) % 2).to(x.dtype)
        scores = x + torch.log(keep) + torch.zeros_like(x).masked_fill(keep == 0, -math.inf)
        return scores.softmax(-1) * 1e-3


class MaskMaker(nn.Module):
    """A module of its own that gives a mask of -Inf, and holds no parameter."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.zeros_like(x).masked_fill(torch.arange(x.shape[-1]) % 2 == 0, -math.inf)


class MaskedByModule(Faulty):
    """Infinities that do no harm, and that a module gives back."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__(inner)
        self.mask = MaskMaker()

    def fault(self, x: torch.Tensor) -> torch.Tensor:
        return (x + self.mask(x)).softmax(-1) * 1e-3


class Growing(nn.Module):
    """Gives +Inf."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.exp(x.detach() + 1000.0)


class Divided(Faulty):
    """An infinity that does no harm, as it is divided by."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__(inner)
        self.grow = Growing()

    def fault(self, x: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = 1.0 / self.grow(x)
        return found


def line_of(kind: type[Faulty]) -> str:
    """Return ``file:line`` of the line that makes the fault, as an event says it from where the tests run."""
    lines, first = inspect.getsourcelines(kind)
    at = first + next(number for number, line in enumerate(lines) if "# here" in line)
    path = Path(inspect.getsourcefile(kind) or "")
    return f"{path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path}:{at}"


def planted(kind: type[Faulty], **options: Any) -> tuple[GPT, Faulty]:
    """Return a model with a faulty module in place of the MLP's activation in block 1."""
    model = gpt(**options)
    layer: Any = model.h[1]
    layer.mlp[1] = kind(layer.mlp[1])
    fault: Faulty = layer.mlp[1]
    return model, fault


class Overflowing(nn.Module):
    """Attention by hand whose scores leave the range of float16, where ``on``."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.q, self.k, self.v = (nn.Linear(width, width) for _ in range(3))
        self.on = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.q(x), self.k(x), self.v(x)
        if self.on:
            q, k = q * 0.0 + 300.0, k * 0.0 + 300.0
        scores = q @ k.transpose(-2, -1)  # here
        length = x.shape[1]
        scores = scores.masked_fill(torch.ones(length, length).triu(1).bool(), -math.inf)
        found: torch.Tensor = scores.softmax(-1) @ v
        return found


class BeforeTheChild(Faulty):
    """A fault in a module's own forward, before what it calls: the child is only given it. Beside it lies what does no harm."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        kept = x.detach()
        shares = (kept + torch.log((torch.arange(x.shape[-1]) % 2).to(x.dtype))).softmax(-1)
        x = x + torch.where(kept > 1e9, kept / (kept * 0.0).abs(), shares)
        found: torch.Tensor = self.inner(self.fault(x)[:, :].contiguous() if self.on else x)
        return found


class LogBeforeTheChild(BeforeTheChild):
    """NaN."""

    def fault(self, x: torch.Tensor) -> torch.Tensor:
        below = -1.0 - x.abs()
        return torch.log(below)  # here


class LogOfNothingBeforeTheChild(BeforeTheChild):
    """-Inf alone, of what is trained: no mask."""

    def fault(self, x: torch.Tensor) -> torch.Tensor:
        nothing = x * 0.0
        return torch.log(nothing)  # here


class ScaledBeforeTheChild(BeforeTheChild):
    """A factor that is no number, in the arithmetic of a norm; handed on by what is no arithmetic."""

    def fault(self, x: torch.Tensor) -> torch.Tensor:
        scaled = (x - x.mean()) * math.nan  # here
        return torch.where(torch.ones_like(x) > 0, scaled.clone(), x).mT.mT


class WrittenBeforeTheChild(BeforeTheChild):
    """Written, by no operation."""

    def fault(self, x: torch.Tensor) -> torch.Tensor:
        written = x.clone()
        written[0] = math.nan
        return written
