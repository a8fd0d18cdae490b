"""A byte-level GPT, as plain as it gets: pre-norm blocks, learned positions, no dropout."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn
from torch.nn import functional as F

VOCABULARY = 256


class Attention(nn.Module):
    """Causal self-attention over ``(batch, time, width)``."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        """Return what each position reads from those before it, same shape as ``x``."""
        batch, time, width = x.shape
        query, key, value = self.qkv(x).view(batch, time, 3, self.heads, width // self.heads).permute(2, 0, 3, 1, 4)
        read = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        mixed: Tensor = self.out(read.transpose(1, 2).reshape(batch, time, width))
        return mixed


class Block(nn.Module):
    """One layer: attention and a four times wider MLP, each behind a norm, each added to the stream."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.attention_norm = nn.LayerNorm(width)
        self.attention = Attention(width, heads)
        self.mlp_norm = nn.LayerNorm(width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: Tensor) -> Tensor:
        """Return the stream ``(batch, time, width)`` after this layer."""
        x = x + self.attention(self.attention_norm(x))
        out: Tensor = x + self.mlp(self.mlp_norm(x))
        return out


class GPT(nn.Module):
    """A language model of bytes."""

    def __init__(self, context: int, width: int, layers: int, heads: int) -> None:
        super().__init__()
        self.token_embedding = nn.Embedding(VOCABULARY, width)
        self.position_embedding = nn.Embedding(context, width)
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(layers))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, VOCABULARY, bias=False)
        self.apply(_initialise)
        # GPT-2's way: what is added to the stream in each of 2 · layers places starts smaller, so that the sum does not grow.
        for name, weight in self.named_parameters():
            if name.endswith(("attention.out.weight", "mlp.2.weight")):
                nn.init.normal_(weight, std=0.02 / math.sqrt(2 * layers))

    def forward(self, tokens: Tensor) -> Tensor:
        """Map bytes ``(batch, time)`` to logits of the next byte ``(batch, time, 256)``."""
        x = self.token_embedding(tokens) + self.position_embedding(torch.arange(tokens.shape[1], device=tokens.device))
        for block in self.blocks:
            x = block(x)
        logits: Tensor = self.head(self.norm(x))
        return logits

    def loss(self, rows: Tensor) -> Tensor:
        """Return the mean loss, in nats a byte, of predicting each byte of ``rows`` (batch, context + 1) but the first."""
        logits = self(rows[:, :-1])
        return F.cross_entropy(logits.flatten(0, 1), rows[:, 1:].flatten())


def _initialise(module: nn.Module) -> None:
    if isinstance(module, nn.Linear | nn.Embedding):
        nn.init.normal_(module.weight, std=0.02)
    if isinstance(module, nn.Linear) and module.bias is not None:
        nn.init.zeros_(module.bias)
