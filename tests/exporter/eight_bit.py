"""An AdamW that keeps its moments in eight bits, block by block, with the names that bitsandbytes gives them."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch

BLOCK = 64


def pack(values: torch.Tensor, signed: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """Return codes (uint8, of the values' shape) and the largest absolute value of each block."""
    flat = torch.nn.functional.pad(values.flatten(), (0, -values.numel() % BLOCK)).view(-1, BLOCK)
    largest = flat.abs().amax(dim=1).clamp(min=1e-30)
    scaled = flat / largest[:, None]
    codes = (scaled * 127 + 128).round() if signed else (scaled.sqrt() * 255).round()
    return codes.to(torch.uint8).flatten()[: values.numel()].view_as(values), largest


def unpack(codes: torch.Tensor, largest: torch.Tensor, signed: bool) -> torch.Tensor:
    flat = torch.nn.functional.pad(codes.flatten().float(), (0, -codes.numel() % BLOCK)).view(-1, BLOCK)
    scaled = (flat - 128) / 127 if signed else (flat / 255) ** 2
    return (scaled * largest[:, None]).flatten()[: codes.numel()].view_as(codes)


class AdamW8bit(torch.optim.Optimizer):
    """``named`` is what its two states are called: the moments' own names hold codes here, too, as in some libraries."""

    def __init__(
        self, params: Iterable[torch.nn.Parameter], lr: float = 1e-3, named: tuple[str, str] = ("state1", "state2")
    ) -> None:
        super().__init__(params, {"lr": lr, "betas": (0.9, 0.99), "eps": 1e-8, "weight_decay": 0.01})
        self.named = named

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> None:  # type: ignore[override]
        first, second = self.named
        for group in self.param_groups:
            beta1, beta2 = group["betas"]
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                state = self.state[parameter]
                if not state:
                    state["step"] = 0
                    for name, signed in ((first, True), (second, False)):
                        state[name], state[f"absmax_{name}"] = pack(torch.zeros_like(parameter), signed)
                state["step"] += 1
                mean = unpack(state[first], state[f"absmax_{first}"], True).lerp(parameter.grad, 1 - beta1)
                square = unpack(state[second], state[f"absmax_{second}"], False)
                square = square.mul(beta2).addcmul(parameter.grad, parameter.grad, value=1 - beta2)
                state[first], state[f"absmax_{first}"] = pack(mean, True)
                state[second], state[f"absmax_{second}"] = pack(square, False)
                size = group["lr"] / (1 - beta1 ** state["step"])
                root = (square / (1 - beta2 ** state["step"])).sqrt().add_(group["eps"])
                parameter.mul_(1 - group["lr"] * group["weight_decay"]).addcdiv_(mean, root, value=-size)
