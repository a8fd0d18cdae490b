"""What a model is called with, told by a hook that leaves no trace in copies of the model and in files with it."""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn

from trainwarden.exporter import tokens

#: Of a model's arguments by name, those that its tokens are found by; what else there is may be large.
NAMES = frozenset(
    (
        *tokens.INPUT_NAMES,
        *tokens.LABEL_NAMES,
        *tokens.MASK_NAMES,
        *tokens.LOSS_MASK_NAMES,
        *tokens.POSITION_NAMES,
        *tokens.DOCUMENT_NAMES,
        *tokens.OFFSET_NAMES,
    )
)


class Hook:
    """Calls ``tell(module, args, kwargs)`` before ``module`` is, and before what else is told of that: a step may end with the
    call, and the pass that begins then is no more part of it. Pickled or copied it is a function that does nothing.
    """

    def __init__(self, tell: Callable[[nn.Module, Any, Any], None], module: nn.Module) -> None:
        self._tell = tell
        self.module = weakref.ref(module)
        self._handle = module.register_forward_pre_hook(self, with_kwargs=True, prepend=True)

    def __call__(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        """Tell of the call."""
        self._tell(module, args, kwargs)

    def __reduce__(self) -> Any:
        return getattr, (contextlib.nullcontext(), "__exit__")

    def remove(self) -> None:
        """Take the hook off."""
        self._handle.remove()


def batch_of(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Return what a model was called with as a batch, or None where nothing in it looks like tokens."""
    batch: Any = kwargs
    if args and isinstance(args[0], torch.Tensor):
        batch = {"input_ids": args[0], **kwargs} if kwargs else args[0] if len(args) == 1 else list(args[:2])
    elif args:
        batch = args[0]
    if isinstance(batch, Mapping) and any(name in batch for name in tokens.INPUT_NAMES):
        batch = {name: batch[name] for name in NAMES if name in batch}
    return None if tokens.find_tokens(batch) is None else batch
