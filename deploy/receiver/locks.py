"""The locks of a run folder: one supervisor, one trainer, and no start while a plan is being written.

All are flock(2) locks, which the kernel drops with the last copy of the descriptor, however a process ends:

* ``RUN/supervisor.lock``: held by the supervisor as long as it lives.
* ``RUN/trainer.lock``: held by the trainer and its keeper, not by the supervisor, which may die first.
* ``RUN/start.lock``: held for moments, by a supervisor that chooses the next attempt and by a receiver that writes a
  plan: an attempt begins either before the plan, and then the plan is refused, or with it.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import time
from collections.abc import Iterator
from pathlib import Path


def take(path: Path) -> int | None:
    """Open and lock the file and return its descriptor, or None if somebody else holds the lock.

    Raises:
        OSError: the file cannot be created or opened.
    """
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(descriptor)
        return None
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


@contextlib.contextmanager
def held(path: Path, seconds: float) -> Iterator[None]:
    """Hold the lock during the block, having waited for it at most ``seconds``.

    Raises:
        TimeoutError: somebody else held it all the time.
        OSError: as :func:`take`.
    """
    end = time.monotonic() + seconds
    while (descriptor := take(path)) is None:
        if time.monotonic() >= end:
            raise TimeoutError(f"{path} was held by another process for {seconds:g} s")
        time.sleep(0.02)
    try:
        yield
    finally:
        os.close(descriptor)
