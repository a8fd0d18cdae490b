"""To look at logits takes a bounded piece of memory, whatever the size of the attention, and finds the same."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from trainwarden.exporter import logits
from trainwarden.exporter.logits import ROWS, SEQUENCES, sampled


class Largest(TorchDispatchMode):
    """Notes the bytes of the largest storage that was made."""

    bytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        if isinstance(made, Tensor):
            given = {arg.untyped_storage().data_ptr() for arg in args if isinstance(arg, Tensor)}
            if made.untyped_storage().data_ptr() not in given:
                self.bytes = max(self.bytes, made.untyped_storage().nbytes())
        return made


def by_hand(query: Tensor, key: Tensor, mask: Tensor | None, causal: bool) -> float:
    """The largest logit of the sampled rows, in float64."""
    batch, heads, length, size = query.shape
    every = max(1, batch // SEQUENCES)
    chosen = range((batch - 1) % every, batch, every)
    step = length // min(ROWS, length)
    rows = range((length - 1) % step, length, step)
    found = -math.inf
    for sequence in chosen:
        for head in range(heads):
            of_head = key[sequence, head * key.shape[1] // heads].double()
            for row in rows:
                scores = of_head @ query[sequence, head, row].double() / math.sqrt(size)
                if causal:
                    scores = scores[: row + 1]
                if mask is not None:
                    whole = mask.expand(batch, heads, length, key.shape[2])[sequence, head, row]
                    scores = scores[whole] if mask.dtype is torch.bool else scores + whole.double()
                found = max(found, float(scores.max()))
    return found


@pytest.mark.parametrize("shared", [1, 4])
@pytest.mark.parametrize("kind", ["none", "causal", "bool", "float", "keys"])
def test_keys_that_are_looked_at_in_pieces_give_what_all_of_them_give(
    monkeypatch: pytest.MonkeyPatch, shared: int, kind: str
) -> None:
    torch.manual_seed(0)
    query, key = torch.randn(5, 4, 37, 8), torch.randn(5, 4 // shared, 37, 8)
    mask = None
    if kind == "bool":
        mask = torch.rand(5, 1, 37, 37) > 0.3
    elif kind == "float":
        mask = torch.randn(37, 37)
    elif kind == "keys":
        mask = torch.rand(5, 1, 1, 37) > 0.3
    for copied in (1, 1000, 2**22):
        monkeypatch.setattr(logits, "COPIED", copied)
        found = float(sampled(query, key, mask, kind == "causal"))
        assert found == pytest.approx(by_hand(query, key, mask, kind == "causal"), rel=1e-6)


@pytest.mark.parametrize("shared", [1, 8])
def test_no_copy_of_the_keys_is_made_as_a_whole(shared: int) -> None:
    torch.manual_seed(0)
    heads, length, size = 8, 2**14, 64
    query = torch.randn(2, length, heads, size, dtype=torch.bfloat16).transpose(1, 2)
    key = torch.randn(2, length, heads // shared, size, dtype=torch.bfloat16).transpose(1, 2)
    with Largest() as seen:
        sampled(query, key, None, True)
    assert 0 < seen.bytes <= 4 * logits.COPIED < 4 * 2 * heads * length * size
