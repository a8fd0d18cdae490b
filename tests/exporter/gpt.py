"""A small GPT for tests: pre-norm blocks in a list, attention by torch, micro-batches, checkpointing if asked for."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

torch.set_num_threads(1)


class Attention(nn.Module):
    """Causal attention of two heads; by hand (with a softmax) if asked for."""

    def __init__(self, width: int, by_hand: bool = False) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.by_hand = by_hand

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        rows, length, width = x.shape
        q, k, v = self.qkv(x).view(rows, length, 3, 2, width // 2).permute(2, 0, 3, 1, 4)
        if self.by_hand:
            scores = (q @ k.transpose(-2, -1)) * (width // 2) ** -0.5
            scores = scores.masked_fill(torch.ones(length, length, device=x.device).triu(1).bool(), -torch.inf)
            mixed = nn.functional.softmax(scores, dim=-1) @ v
        else:
            mixed = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        found: torch.Tensor = self.out(mixed.transpose(1, 2).reshape(rows, length, width))
        return found


class Layer(nn.Module):
    def __init__(self, width: int, by_hand: bool = False) -> None:
        super().__init__()
        self.ln_1, self.ln_2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attn = Attention(width, by_hand)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.attn(self.ln_1(x))
        found: torch.Tensor = x + self.mlp(self.ln_2(x))
        return found


class GPT(nn.Module):
    """``checkpointing``: None, "reentrant" or "plain"; ``tied``: head and token table share their weight."""

    def __init__(
        self,
        layers: int = 3,
        width: int = 16,
        vocabulary: int = 31,
        length: int = 12,
        checkpointing: str | None = None,
        tied: bool = False,
        by_hand: bool = False,
    ) -> None:
        super().__init__()
        self.wte, self.wpe = nn.Embedding(vocabulary, width), nn.Embedding(length, width)
        self.h = nn.ModuleList(Layer(width, by_hand) for _ in range(layers))
        self.ln_f = nn.LayerNorm(width)
        self.lm_head = nn.Linear(width, vocabulary, bias=False)
        self.checkpointing = checkpointing
        if tied:
            self.lm_head.weight = self.wte.weight

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.wte(ids) + self.wpe(torch.arange(ids.shape[1], device=ids.device))
        for layer in self.h:
            if self.checkpointing and torch.is_grad_enabled():
                x = checkpoint(layer, x, use_reentrant=self.checkpointing == "reentrant")
            else:
                x = layer(x)
        found: torch.Tensor = self.lm_head(self.ln_f(x))
        return found


def gpt(seed: int = 0, dtype: torch.dtype = torch.float32, **options: Any) -> GPT:
    torch.manual_seed(seed)
    return GPT(**options).to(dtype)


def batch(step: int, rows: int = 2, length: int = 12, vocabulary: int = 31) -> torch.Tensor:
    generator = torch.Generator().manual_seed(7000 + step)
    return torch.randint(0, vocabulary, (rows, length + 1), generator=generator)


def loss_on(model: nn.Module, ids: torch.Tensor) -> torch.Tensor:
    return nn.functional.cross_entropy(model(ids[:, :-1]).flatten(0, 1).float(), ids[:, 1:].flatten())


class Outputs:
    """What modules of a model gave back, kept by the test's own hooks; by name, one tensor a call."""

    def __init__(self, model: nn.Module, names: list[str]) -> None:
        self.of: dict[str, list[torch.Tensor]] = {name: [] for name in names}
        self.handles = [model.get_submodule(name).register_forward_hook(self._keeper(name)) for name in names]

    def _keeper(self, name: str) -> Any:
        def keep(module: nn.Module, args: Any, output: Any) -> None:
            if torch._C._current_graph_task_id() == -1:
                self.of[name].append((output[0] if isinstance(output, tuple) else output).detach().double())

        return keep

    def rms(self, *names: str) -> float:
        flat = torch.cat([tensor.flatten() for name in names for tensor in self.of[name]])
        return float(flat.norm() / flat.numel() ** 0.5)

    def absmax(self, *names: str) -> float:
        return max(float(tensor.abs().max()) for name in names for tensor in self.of[name])

    def remove(self) -> None:
        for handle in self.handles:
            handle.remove()
