"""What clipping and scalers did before the first optimizer stepped: kept until there is an exporter to tell it to.

Norms are taken at once where the trainer's own are not at hand: by the time they are told, the gradients have been clipped.
"""

from __future__ import annotations

from collections import deque
from typing import Any

import torch
from torch import Tensor

#: So many calls are kept, the newest, and those of so many rounds: some backward passes and what followed them. Calls hold gradients,
#: which the trainer may have let go of by the next round where nothing that is watched ever steps.
KEPT, ROUNDS = 64, 4


class Early:
    """Keeps calls of ClipListener and ScalerListener in their order."""

    def __init__(self) -> None:
        self._calls: deque[tuple[int, str, tuple[Any, ...]]] = deque(maxlen=KEPT)
        self._round = 0

    def __len__(self) -> int:
        return len(self._calls)

    def backward(self) -> None:
        """A backward pass begins. Behind a call it begins a round; calls of old rounds are let go."""
        if self._calls and self._calls[-1][0] == self._round:
            self._round += 1
        while self._calls and self._calls[0][0] <= self._round - ROUNDS:
            self._calls.popleft()

    def forget(self) -> None:
        """Keep nothing."""
        self._calls.clear()

    def _put(self, method: str, arguments: tuple[Any, ...]) -> None:
        self._calls.append((self._round, method, arguments))

    def keep(self, method: str, *arguments: Any) -> None:
        """Keep a call."""
        if method == "clipping_values":
            self._put("total_norm", self._measured(arguments[0]))
        self._put(method, arguments)

    def total_norm(self, tensors: list[Tensor], each: Tensor | None, total: Tensor, norm_type: float) -> None:
        """Keep a norm that was taken."""
        if each is None:
            tensors, each, _, norm_type = self._measured(tensors, gradients=True)
        self._put("total_norm", (tensors, each, total, norm_type))

    def clipping(self, parameters: list[Tensor], max_norm: Any, total: Tensor) -> None:
        """Keep a clipping, with norms of what it clips where none were taken."""
        clipped = {id(one.grad) for one in parameters if one.grad is not None}
        if not any(name == "total_norm" and {id(one) for one in told[0]} == clipped for _, name, told in self._calls):
            self._put("total_norm", self._measured(parameters))
        self._put("clipping", (parameters, max_norm, total))

    def tell(self, listener: Any) -> None:
        """Tell ``listener`` everything and keep nothing."""
        while self._calls:
            _, method, arguments = self._calls.popleft()
            getattr(listener, method)(*arguments)

    def _measured(
        self, tensors: list[Tensor], gradients: bool = False
    ) -> tuple[list[Tensor], Tensor | None, Any, float]:
        """Return the arguments of ``total_norm`` for parameters, or for gradients, as they are now."""
        found = tensors if gradients else [one.grad for one in tensors if one.grad is not None]
        shards = [getattr(one, "_local_tensor", one) for one in found]
        with torch.no_grad():
            plain = all(one.layout is torch.strided and one.numel() for one in shards)
            if not shards or not plain or len({one.device for one in shards}) > 1:
                return [], None, None, 2.0
            each = torch.stack([torch.linalg.vector_norm(one, 2.0, dtype=_wide(one)).float() for one in shards])
        return found, each, None, 2.0


def _wide(tensor: Tensor) -> torch.dtype:
    return torch.float64 if tensor.dtype is torch.float64 else torch.float32
