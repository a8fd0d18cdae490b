"""The one queue between everything that brings inputs and the core thread. It is bounded: a full one slows pullers."""

from __future__ import annotations

import queue
import threading
from typing import TypeAlias

import msgspec

from trainwarden.rules.core.inputs import Tick
from trainwarden.rules.sources.lines import Read
from trainwarden.rules.store import Journalled


class Received(msgspec.Struct, frozen=True):
    """An input that is in the input journal already, under its id there."""

    identity: int
    value: Journalled


Item: TypeAlias = Read | Received | Tick


class Inbox:
    """A bounded queue that can be closed."""

    def __init__(self, size: int) -> None:
        self._queue: queue.Queue[Item | None] = queue.Queue(size)
        self._closed = threading.Event()

    def put(self, item: Item) -> bool:
        """Put an item, waiting while the queue is full; False once it is closed."""
        while not self._closed.is_set():
            try:
                self._queue.put(item, timeout=0.2)
                return True
            except queue.Full:
                continue
        return False

    def offer(self, item: Item) -> bool:
        """Put an item that is worth nothing later; False where the queue is full or closed."""
        if self._closed.is_set():
            return False
        try:
            self._queue.put_nowait(item)
            return True
        except queue.Full:
            return False

    def take(self, timeout: float) -> Item | None:
        """Take the oldest item, or return None after ``timeout`` seconds without one."""
        try:
            return self._queue.get(timeout=max(timeout, 0.001))
        except queue.Empty:
            return None

    def close(self) -> None:
        """Take no more items; what is in stays to be taken."""
        self._closed.set()

    @property
    def closed(self) -> bool:
        """Whether no more items are taken."""
        return self._closed.is_set()

    def __len__(self) -> int:
        return self._queue.qsize()
