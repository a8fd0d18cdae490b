"""Each operation of a forward pass, as Python calls it: which was the first to make of finite values what is not finite.

A mode of torch's on the way from Python into torch, above autograd: what runs, and in which precision, is what would have run without it.
It is entered where the outermost module begins and left where it ends, so that modes of the trainer's own nest with it.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, MutableMapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode, _get_current_function_mode_stack, _pop_mode
from torch.utils.weak import WeakTensorKeyDictionary

from .gathering import IN_PASS, Pass
from .numbers import is_bad, is_harm, readable, tensors_in
from .where import Sites

#: Operations that write what they are told, or leave memory as it is: nothing that is not finite is their doing.
FILLING = frozenset(
    (
        "masked_fill",
        "masked_fill_",
        "full",
        "full_like",
        "new_full",
        "fill_",
        "empty",
        "empty_like",
        "empty_strided",
        "new_empty",
        "new_empty_strided",
        "tensor",
        "as_tensor",
        "where",
        "zeros",
        "zeros_like",
        "ones",
        "ones_like",
        "index_fill",
        "index_fill_",
        "triu",
        "tril",
        "triu_",
        "tril_",
        "copy_",
        "set_",
        "load",
        "__setitem__",
        "masked_scatter",
        "from_numpy",
        "resize_",
        "clone",
        "detach",
    )
)

#: What gathers and scatters parameters goes on beside the forward pass: what it works on may not be there yet.
BESIDE = str(Path(torch.__file__).parent / "distributed")

#: Makes one of the exporter's functions run without touching what the trainer does.
Guard = Callable[..., Any]


class Operations(TorchFunctionMode):
    """Tells of the operations of one pass."""

    def __init__(self, seen: Pass, sites: Sites, guard: Guard) -> None:
        super().__init__()
        self._pass = seen
        self._sites = sites
        self._guard = guard
        #: The operations that made a tensor: the last one, or several of which it was put together.
        self._makers: MutableMapping[Tensor, tuple[int, ...]] = WeakTensorKeyDictionary()
        self.entered = False
        self.active = True

    def enter(self) -> None:
        """Begin."""
        self.__enter__()  # type: ignore[no-untyped-call]
        self.entered = True

    def leave(self) -> None:
        """End, also where an exception has left modes behind above this one."""
        self.active = False
        while self.entered:
            stack = _get_current_function_mode_stack()  # type: ignore[no-untyped-call]
            if self not in stack:
                self.entered = False
            elif stack[-1] is self:
                self.__exit__(None, None, None)
                self.entered = False
            elif isinstance(stack[-1], Operations):
                _pop_mode()  # type: ignore[no-untyped-call]
            else:
                return  # somebody else's is above: it goes first

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Let it run, and look at what went in and what came out."""
        kwargs = kwargs or {}
        name = getattr(func, "__name__", "")
        apart = not self.active or len(self._pass.operations) >= IN_PASS
        if apart or sys._getframe(1).f_code.co_filename.startswith(BESIDE):
            return func(*args, **kwargs)
        if name == "__get__":
            result = func(*args, **kwargs)
            if isinstance(result, torch.Tensor):
                self._guard(self._handed_on, result, args)
            return result
        before = self._guard(self._before, args, kwargs)
        sources = self.makers([args, kwargs])
        result = func(*args, **kwargs)
        written = args[0] if name == "__setitem__" else result
        if isinstance(written, torch.Tensor | tuple | list) and (name not in FILLING or before is not None):
            self._guard(self._after, name, before, sources, written)
        return result

    def makers(self, given: Any) -> tuple[int, ...]:
        """Return the operations that made the tensors in ``given``."""
        found: tuple[int, ...] | None = self._guard(self._makers_of, given)
        return found or ()

    def _makers_of(self, given: Any) -> tuple[int, ...]:
        return tuple(sorted({maker for x in tensors_in(given) for maker in self._makers.get(x, ())}))

    def _handed_on(self, written: Tensor, given: Any) -> None:
        self._makers[written] = self._makers_of(given)

    def _before(self, args: Any, kwargs: Any) -> Tensor | None:
        taken = [x for x in map(readable, tensors_in([args, kwargs])) if x is not None]
        taken = [x for x in taken if x.device == taken[0].device]
        return is_bad(taken) if taken else None

    def _after(self, name: str, before: Tensor | None, sources: tuple[int, ...], result: Any) -> None:
        given = [x for x in map(readable, tensors_in(result)) if x is not None]
        given = [x for x in given if x.device == given[0].device]
        if not given:
            return
        bad, made = is_bad(given), tensors_in(result)
        harm = bad if all(x.requires_grad for x in made) else is_harm(made)
        number = len(self._pass.operations)
        if before is not None and before.device == bad.device:
            self._pass.cured.add(number, before & ~bad)
            bad = bad & ~before
            harm = None if harm is None else harm & ~before
        if name not in FILLING:
            self._pass.made.add(number, bad)
            if harm is not None:
                self._pass.harm.add(number, harm)
        for x in made:
            self._makers[x] = (number,)
        self._pass.sources.append(sources)
        self._pass.operations.append((name.strip("_") if name.startswith("__") else name, self._sites.here()))
