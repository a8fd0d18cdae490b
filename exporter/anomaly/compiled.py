"""What ``torch.compile`` has been given: there nothing may be hooked, as a hook would have it compiled anew, and otherwise than before.

A model does not know that it was compiled: ``torch.compile(model)`` returns another module around it, a function of the trainer's may call it. So
what the collector of garbage knows is gone through, once a look, and only where something was compiled at all.
"""

from __future__ import annotations

import gc
import sys
from typing import Any

import torch
from torch import nn


class Compiled:
    """``modules``: ids of modules that were compiled, and of all within them. ``anything``, and ``functions``: some of the trainer's own."""

    def __init__(self) -> None:
        self.modules: set[int] = set()
        self.anything = anything()
        self.functions = False
        if not self.anything:
            return
        for one in gc.get_objects():
            try:
                self._look(one)
            except Exception:  # objects of all kinds, some half made
                continue

    def _look(self, one: Any) -> None:
        kind = type(one)
        if kind.__name__ == "OptimizedModule":
            self._add(one._orig_mod)
        elif issubclass(kind, nn.Module):  # its type alone: some objects load what they stand for when they are asked
            if getattr(one, "_compiled_call_impl", None) is not None:
                self._add(one)
        elif kind.__name__ == "function" and "_torchdynamo_orig_callable" in vars(one):
            original = one._torchdynamo_orig_callable
            owner = getattr(original, "__self__", None)
            if isinstance(owner, nn.Module):
                self._add(owner)
            elif not str(getattr(original, "__module__", "")).startswith("torch.") and not disabled(one):
                self.functions = True

    def _add(self, module: nn.Module) -> None:
        self.modules.update(map(id, module.modules()))


def disabled(function: Any) -> bool:
    """Say whether a function is one that is kept from being compiled: it is wrapped alike."""
    return bool(getattr(function, "_torchdynamo_disable", False))


def anything() -> bool:
    """Say whether anything was given to ``torch.compile`` in this process."""
    backends = getattr(sys.modules.get("torch._dynamo.eval_frame"), "cached_backends", {})
    return any(backend is not None for backend in backends.values())


def tracing() -> bool:
    """Say whether what runs is being written down to be compiled: what we did would become part of it."""
    if torch._C._get_tracing_state() is not None or torch._C._functorch.peek_interpreter_stack() is not None:
        return True
    if torch._guards.TracingContext.try_get() is not None or torch.compiler.is_compiling():
        return True
    return torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.PROXY) is not None
