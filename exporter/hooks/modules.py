"""What modules of a model give back, by forward hooks that a compiler can trace.

A hook is a small object of its own, not a method: a copy of the model (an average of its weights, a pickled one) must not carry
the exporter along, so copied or pickled it becomes a callable of the standard library that does nothing.

Where a module runs as it is, the listener is told of its output. Where the module is being traced (``torch.compile`` after the hooks
were set), the hook leaves one operator in the graph, :func:`observe`, which a compiler can neither look into nor leave out, as
it writes into the module's own row of statistics. Whether there is anything to measure is decided when it runs, in Python, so
nothing is compiled again for it; no row and no number is a constant of the graph, so like blocks share one. Without gradients no
operator is left at all.
"""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any, Protocol
from weakref import WeakValueDictionary, ref

import torch
from torch import Tensor, nn

#: How deep a tensor is looked for in what a module gives back: a list may hold itself.
DEPTH = 16


class ModuleListener(Protocol):
    """Who wants to know. None of these may raise."""

    def entered(self, module: nn.Module) -> None:
        """A module above the watched ones begins its forward."""

    def left(self, module: nn.Module) -> None:
        """A module above the watched ones has ended its forward."""

    def gave(self, number: int, output: Any) -> None:
        """The watched module ``number`` gave ``output`` back."""

    def took(self, number: int, given: Any) -> None:
        """The watched input ``number`` is ``given``."""

    def traced(self, x: Tensor, row: Tensor) -> None:
        """Inside a compiled graph, the module whose row is ``row`` gave ``x`` back, or took it."""


#: Listeners by the number that their operators carry.
_listeners: WeakValueDictionary[int, Any] = WeakValueDictionary()
_next = iter(range(1, 2**62))


def number_of(listener: ModuleListener) -> int:
    """Make a listener known to :func:`observe`, and return its number."""
    number = next(_next)
    _listeners[number] = listener
    return number


def forget(number: int) -> None:
    """Operators that carry ``number`` do nothing any more."""
    _listeners.pop(number, None)


@torch.library.custom_op("trainwarden::observe", mutates_args=("row",))
def observe(x: Tensor, row: Tensor, listener: int) -> None:
    """Have the listener measure ``x`` (any shape) into ``row`` (1-D float32); what it finds is not part of any graph."""
    known = _listeners.get(listener)
    if known is not None:
        known.traced(x, row)


@observe.register_fake
def _(x: Tensor, row: Tensor, listener: int) -> None:
    return None


class _Hook:
    """What all have in common: whose module it is, and that copies of it do nothing."""

    __slots__ = ("_listener", "_module")

    def __init__(self, module: nn.Module, listener: ModuleListener) -> None:
        self._module = ref(module)
        self._listener = listener

    def __reduce__(self) -> tuple[Any, ...]:
        return getattr, (nullcontext(), "__exit__")


class Entered(_Hook):
    """Before the forward of a module above the watched ones."""

    __slots__ = ()

    def __call__(self, module: nn.Module, args: Any) -> None:
        """Tell of it."""
        if not torch.compiler.is_compiling() and self._module() is module:
            self._listener.entered(module)


class Left(_Hook):
    """After the forward of a module above the watched ones."""

    __slots__ = ()

    def __call__(self, module: nn.Module, args: Any, output: Any) -> None:
        """Tell of it."""
        if not torch.compiler.is_compiling() and self._module() is module:
            self._listener.left(module)


class _Watching(_Hook):
    """Of a watched module. ``row`` is where a compiled graph writes, None where none shall; ``key`` is the listener's number."""

    __slots__ = ("_key", "_number", "_row")

    def __init__(
        self, module: nn.Module, listener: ModuleListener, number: int, row: Tensor | None = None, key: int = 0
    ) -> None:
        super().__init__(module, listener)
        self._number = number
        self._row = row
        self._key = key

    def _trace(self, module: nn.Module, value: Any) -> None:
        """Leave the operator in the graph that is being made."""
        if self._row is not None and torch.is_grad_enabled() and not torch.compiler.is_exporting():
            x = value[0] if isinstance(value, tuple) else value
            if module.training and isinstance(x, torch.Tensor) and x.is_floating_point():
                torch.ops.trainwarden.observe(x.detach(), self._row, self._key)


class Took(_Watching):
    """Before the forward: what the module takes."""

    __slots__ = ()

    def __call__(self, module: nn.Module, args: Any) -> None:
        """Tell of it, or leave the operator in a graph."""
        if torch.compiler.is_compiling():
            self._trace(module, args)
        elif self._module() is module:
            self._listener.took(self._number, args)


class Gave(_Watching):
    """After the forward: what the module gives back."""

    __slots__ = ()

    def __call__(self, module: nn.Module, args: Any, output: Any) -> None:
        """Tell of it, or leave the operator in a graph."""
        if torch.compiler.is_compiling():
            self._trace(module, output)
        elif self._module() is module:
            self._listener.gave(self._number, output)


def tensor_of(output: Any) -> Tensor | None:
    """Return the tensor that a module gave back, the first of several; None where there is none."""
    for _ in range(DEPTH):
        if not isinstance(output, tuple | list) or not output:
            break
        output = output[0]
    return output if isinstance(output, torch.Tensor) else None
