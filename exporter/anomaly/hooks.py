"""Hooks on all modules of a model, for some steps: when each begins, and when it ends, also by an exception.

As :mod:`exporter.hooks.modules`, copied or pickled a hook becomes a callable that does nothing; within a compiler it does nothing either.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import nullcontext
from typing import Any, Protocol
from weakref import ref

import torch
from torch import nn

from trainwarden.exporter.blocks import FAST
from trainwarden.exporter.groups import clean

from .compiled import Compiled


class Listener(Protocol):
    """Who wants to know. Neither may raise."""

    def entered(self, number: int, module: nn.Module, given: Any) -> None:
        """The module ``number`` begins its forward with ``given``."""

    def left(self, number: int, module: nn.Module, output: Any) -> None:
        """It has ended, with ``output``; None where an exception goes through it."""


class Found:
    """The modules of a model that can be looked at: ``names`` without wrappers, ``modules`` in parallel, by their order in the model.

    ``fast`` are the numbers of those through which torch goes another way without gradients as long as nobody listens. ``compiled`` names what was
    compiled, within which nothing is seen, ``left_out`` counts those beyond the ``most``.
    """

    def __init__(self, model: nn.Module, most: int) -> None:
        known = Compiled()
        self.anything_compiled = known.anything
        self._within = known.modules
        self.names: list[str] = []
        self.modules: list[nn.Module] = []
        self.fast: list[int] = []
        self.compiled: list[str] = []
        self.left_out = 0
        self._most = most
        self._seen: set[int] = set()
        if known.functions:
            self.compiled.append("functions of the trainer's, which may call the model")
        else:
            self._add("", model, False)

    def _add(self, path: str, module: nn.Module, fast: bool) -> None:
        if id(module) in self._seen:
            return
        self._seen.add(id(module))
        compiled = type(module).__name__ == "OptimizedModule"  # from outside of it, it can be looked at
        if compiled or id(module) in self._within:
            self.compiled.append(clean(path) or "the model")
        if not compiled and id(module) in self._within:
            return  # its hooks would become part of the graph
        fast = fast or isinstance(module, FAST | nn.MultiheadAttention)
        container = isinstance(module, nn.ModuleList | nn.ModuleDict)
        if not container and not isinstance(module, torch.jit.ScriptModule):
            if len(self.modules) < self._most:
                if fast and path:
                    self.fast.append(len(self.modules))
                self.names.append(clean(path))
                self.modules.append(module)
            else:
                self.left_out += 1
        if not compiled:
            for name, child in module.named_children():
                self._add(f"{path}.{name}" if path else name, child, fast)


def hook(found: Found, numbers: Iterator[int], listener: Listener) -> list[Any]:
    """Set the hooks of some modules and return their handles."""
    handles: list[Any] = []
    for number in numbers:
        module = found.modules[number]
        entering, leaving = Entering(number, module, listener), Leaving(number, module, listener)
        handles.append(module.register_forward_pre_hook(entering, prepend=True, with_kwargs=True))
        handles.append(module.register_forward_hook(leaving, always_call=True))
    return handles


class _Hook:
    __slots__ = ("_listener", "_module", "_number")

    def __init__(self, number: int, module: nn.Module, listener: Listener) -> None:
        self._number = number
        self._module = ref(module)
        self._listener = listener

    def __reduce__(self) -> tuple[Any, ...]:
        return getattr, (nullcontext(), "__exit__")


class Entering(_Hook):
    """Before a forward."""

    __slots__ = ()

    def __call__(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        """Tell of it."""
        if not torch.compiler.is_compiling() and self._module() is module:
            self._listener.entered(self._number, module, (args, kwargs))


class Leaving(_Hook):
    """After a forward."""

    __slots__ = ()

    def __call__(self, module: nn.Module, args: Any, output: Any) -> None:
        """Tell of it."""
        if not torch.compiler.is_compiling() and self._module() is module:
            self._listener.left(self._number, module, output)
