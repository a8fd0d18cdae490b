"""Catches what code of the exporter does on the training thread that could make it wait: locks, sockets, files, sleep, collectives.

Locks that are made while :class:`Watch` is entered note who takes them, also in a ``with``. Everything else is seen by the
interpreter's profiler, which tells of each call into C, and of calls into torch.distributed's Python. What counts is whether a
frame of the exporter's is on the stack: the trainer's own loader and collectives may wait as they like.
"""

from __future__ import annotations

import _socket
import builtins
import io
import os
import select
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any

import torch.distributed as dist

import trainwarden.exporter

HOME = str(Path(trainwarden.exporter.__file__).parent)
REAL_HOME = str(Path(trainwarden.exporter.__file__).resolve().parent)

_LOCKS = (type(threading.Lock()), type(threading.RLock()))
_WAITING: frozenset[Any] = frozenset(
    [time.sleep, builtins.open, io.open, os.open, os.read, os.write, os.fsync, os.replace, select.select]
)
#: Python of torch that sends something to other ranks.
_COLLECTIVE_FILES = ("distributed/distributed_c10d.py", "distributed/_functional_collectives.py")


#: Functions of ours that hand a call of the trainer's on to where it was meant to go: what happens there is the trainer's.
_HANDED_ON = frozenset(
    {
        ("clipping.py", "get_total_norm"),
        ("clipping.py", "clip_grads_with_norm_"),
        ("clipping.py", "clip_grad_value_"),
        ("reduction.py", "__call__"),
        ("observer.py", "watched_closure"),
        ("backward.py", "watched_run_backward"),
        ("operations.py", "__torch_function__"),
    }
)


def _native() -> frozenset[int]:
    """Return the ids of the C functions by which stores and process groups talk to others."""
    c10d = dist.distributed_c10d
    kinds = [
        c10d.ProcessGroup,
        c10d.Store,
        c10d.Work,
        *(getattr(c10d, name, c10d.Store) for name in ("TCPStore", "PrefixStore")),
    ]
    kinds.append(dist.ProcessGroupGloo)
    harmless = {"rank", "size", "name", "__init__", "_get_backend_name", "group_name", "bound_device_id"}
    found = set()
    for kind in kinds:
        for name, member in vars(kind).items():
            function = getattr(member, "__func__", None)
            if function is not None and name not in harmless:
                found.add(id(function))
    return frozenset(found)


class Watch:
    """While entered, :attr:`caught` lists what the exporter's code did on this thread that could make it wait."""

    def __init__(self) -> None:
        self.caught: list[str] = []
        self._thread = threading.get_ident()
        self._real = (threading.Lock, threading.RLock)
        self._native = _native()

    def __enter__(self) -> Watch:
        lock, rlock = self._real
        threading.Lock = lambda: _Noted(lock(), self)  # type: ignore[assignment, misc]
        threading.RLock = lambda: _Noted(rlock(), self)  # type: ignore[assignment, misc]
        sys.setprofile(self._look)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        sys.setprofile(None)
        threading.Lock, threading.RLock = self._real  # type: ignore[misc]

    def note(self, what: str) -> None:
        """Add ``what`` to the catch if this is the training thread, inside code of the exporter."""
        if threading.get_ident() == self._thread:
            frame = _ours(sys._getframe(1))
            if frame is not None:
                self.caught.append(f"{what} at {Path(frame.f_code.co_filename).name}:{frame.f_lineno}")

    def _look(self, frame: FrameType, event: str, argument: Any) -> None:
        if event == "call":
            if frame.f_code.co_filename.endswith(_COLLECTIVE_FILES):
                caller = _ours(frame)
                if caller is not None:
                    self.note(f"torch.distributed {frame.f_code.co_name}")
        elif event == "c_call" and self._waits(argument):
            self.note(getattr(argument, "__qualname__", repr(argument)))

    def _waits(self, function: Any) -> bool:
        owner = getattr(function, "__self__", None)
        if isinstance(owner, (*_LOCKS, _socket.socket)):
            return getattr(function, "__name__", "") not in ("release", "_is_owned", "fileno")
        if id(function) in self._native:
            return True
        try:
            return function in _WAITING
        except TypeError:
            return False


class _Noted:
    """A lock that tells who takes it."""

    def __init__(self, lock: Any, watch: Watch) -> None:
        self._lock, self._watch = lock, watch

    def acquire(self, *arguments: Any, **named: Any) -> bool:
        self._watch.note("lock")
        taken: bool = self._lock.acquire(*arguments, **named)
        return taken

    def __enter__(self) -> bool:
        return self.acquire()

    def __exit__(self, *error: object) -> None:
        self._lock.release()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._lock, name)


def _ours(frame: FrameType | None) -> FrameType | None:
    """Return the nearest frame of the exporter's on the stack, or None; none where that one only hands on."""
    while frame is not None:
        if frame.f_code.co_filename.startswith((HOME, REAL_HOME)):
            handed_on = (Path(frame.f_code.co_filename).name, frame.f_code.co_name) in _HANDED_ON
            return None if handed_on else frame
        frame = frame.f_back
    return None


def caught(function: Callable[[], Any]) -> list[str]:
    """Return what is caught while ``function`` runs."""
    with Watch() as watch:
        function()
    return watch.caught
