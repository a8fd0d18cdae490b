"""What attention computes with: queries and keys, or its scores, by listening in on ``torch.nn.functional``.

``scaled_dot_product_attention`` and ``softmax`` are replaced wherever a loaded module holds them as a global, torch's own
``multi_head_attention_forward`` among them. Where somebody traces, compiles or scripts, or gives tensors of classes of their own,
the originals are called as if nobody listened. What stays unseen: kernels that torch does not know, attention within a
compiled graph, ``Tensor.softmax``, and a reference that was kept elsewhere (in a closure, a class, a partial).
"""

from __future__ import annotations

from typing import Any, Protocol
from weakref import WeakSet

import torch
from torch import Tensor, nn
from torch.jit import _builtins
from torch.nn import functional
from torch.overrides import handle_torch_function, has_torch_function

from .replaced import Replaced, named_as

_PLAIN = (torch.Tensor, nn.Parameter)


class AttentionListener(Protocol):
    """Who wants to know. None of these may raise."""

    def attended(
        self, query: Tensor, key: Tensor, mask: Tensor | None, causal: bool, scale: float | None, output: Tensor
    ) -> None:
        """Attention was computed from queries (…, L, E) and keys (…, S, E)."""

    def weighed(self, scores: Tensor) -> None:
        """A softmax was taken over the last dimension of what can be scores: (…, heads, L, S), or (…, L, L)."""


_listeners: WeakSet[Any] = WeakSet()
_replaced = Replaced()


def listen(listener: AttentionListener) -> None:
    """Tell ``listener`` of all attention from now on."""
    _listeners.add(listener)
    if not _replaced.on:
        _install()


def forget(listener: AttentionListener) -> None:
    """Tell ``listener`` nothing any more; with the last one gone, torch is as it was."""
    _listeners.discard(listener)
    if not _listeners:
        for wrapper in _replaced.give_back():
            _builtins._get_builtin_table().pop(id(wrapper), None)  # type: ignore[no-untyped-call]


def _install() -> None:
    attention, softmax = functional.scaled_dot_product_attention, functional.softmax
    _replaced.put_everywhere({id(attention): _attention(attention), id(softmax): _softmax(softmax)})


def _unheard() -> bool:
    """Say whether nobody must notice that somebody listens."""
    return torch.compiler.is_compiling() or torch._C._get_tracing_state() is not None or not _listeners


def _are_scores(x: Tensor) -> bool:
    """Say whether these can be scores of queries against keys. A router's, (batch, tokens, experts), or a vocabulary's are not."""
    return x.ndim > 3 or (x.ndim == 3 and x.shape[-1] == x.shape[-2])


def _attention(original: Any) -> Any:
    def scaled_dot_product_attention(query: Tensor, key: Tensor, value: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        mask = kwargs["attn_mask"] if "attn_mask" in kwargs else args[0] if args else None
        found: Tensor
        given = (query, key, value)
        if mask is not None and type(mask) not in _PLAIN and has_torch_function((mask, *given)):
            # A class that takes this function over knows it by the name under which it found it. What a compiler traces
            # with is a class of its own that takes nothing over.
            found = handle_torch_function(scaled_dot_product_attention, (mask, *given), *given, *args, **kwargs)
            return found
        found = original(query, key, value, *args, **kwargs)
        if not _unheard() and type(query) in _PLAIN and type(key) in _PLAIN:
            causal = kwargs["is_causal"] if "is_causal" in kwargs else args[2] if len(args) > 2 else False
            for listener in list(_listeners):
                listener.attended(query, key, mask, bool(causal), kwargs.get("scale"), found)
        return found

    named_as(scaled_dot_product_attention, original, functional.__name__)
    _builtins._register_builtin(scaled_dot_product_attention, "aten::scaled_dot_product_attention")
    return scaled_dot_product_attention


def _softmax(original: Any) -> Any:
    def softmax(input: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        found: Tensor = original(input, *args, **kwargs)
        if not _unheard() and type(input) in _PLAIN:
            dim = kwargs["dim"] if "dim" in kwargs else args[0] if args else None
            if dim in (-1, input.ndim - 1) and _are_scores(input):
                for listener in list(_listeners):
                    listener.weighed(input)
        return found

    named_as(softmax, original)
    softmax.__prepare_scriptable__ = lambda: original  # type: ignore[attr-defined]
    return softmax
