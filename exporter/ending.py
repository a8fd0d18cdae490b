"""How the process ends, as far as Python tells: at exit, by an exception nobody caught, by Ctrl-C.

No handler of a signal is set: one would keep a trainer that hangs in a collective from dying of SIGTERM. A trainer that
handles SIGTERM itself says so with ``exporter.close(reason="signal", code=143)``.
"""

from __future__ import annotations

import atexit
import sys
import weakref
from collections.abc import Callable
from typing import Any

#: Exit status of a process that Ctrl-C ended.
INTERRUPTED = 130


class Ending:
    """Calls ``close(reason, code)`` once, when the interpreter exits. The code of a plain exit is not known: None."""

    def __init__(self, close: Callable[[str, int | None], None]) -> None:
        self._close: Callable[[], Callable[[str, int | None], None] | None] = weakref.WeakMethod(close)
        self._reason: tuple[str, int | None] = ("finished", None)
        self._previous = sys.excepthook
        self._hook = self._on_exception
        sys.excepthook = self._hook
        atexit.register(self._at_exit)

    def _on_exception(self, kind: type[BaseException], error: BaseException, trace: Any) -> None:
        interrupted = issubclass(kind, KeyboardInterrupt)
        self._reason = ("signal", INTERRUPTED) if interrupted else ("exception", 1)
        self._previous(kind, error, trace)

    def _at_exit(self) -> None:
        close = self._close()
        if close is not None:
            close(*self._reason)

    def forget(self) -> None:
        """Do nothing at exit any more."""
        atexit.unregister(self._at_exit)
        if sys.excepthook is self._hook:
            sys.excepthook = self._previous
