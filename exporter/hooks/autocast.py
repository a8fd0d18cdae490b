"""Which types an autocast computes in, by listening in on ``torch.autocast``.

Neither loss nor gradients show it: both come back in float32. Only entering one is seen, which needs no value of a tensor.
"""

from __future__ import annotations

from typing import Any, Protocol
from weakref import WeakSet

from torch.amp.autocast_mode import autocast

from .replaced import Replaced, named_as


class AutocastListener(Protocol):
    """Who wants to know. Must not raise."""

    def autocast(self, dtype: str) -> None:
        """An autocast to ``dtype`` (``float16``) was entered."""


_listeners: WeakSet[Any] = WeakSet()
_replaced = Replaced()


def listen(listener: AutocastListener) -> None:
    """Tell ``listener`` of every autocast that is entered from now on."""
    _listeners.add(listener)
    if not _replaced.on:
        _replaced.put(autocast, "__enter__", _enter)


def forget(listener: AutocastListener) -> None:
    """Tell ``listener`` nothing any more; with the last one gone, torch is as it was."""
    _listeners.discard(listener)
    if not _listeners:
        _replaced.give_back()


def _enter(enter: Any) -> Any:
    def watched_enter(self: Any) -> Any:
        if getattr(self, "_enabled", False):
            for known in list(_listeners):
                known.autocast(str(getattr(self, "fast_dtype", "")).removeprefix("torch."))
        return enter(self)

    return named_as(watched_enter, enter)
