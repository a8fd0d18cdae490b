"""Weights & Biases: what a script logs with ``wandb.log`` or ``run.log`` is also told to whoever listens.

The library is not imported here: it is followed once the script has. It is given what it was given, and answers for itself.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Mapping
from typing import Any

MODULE = "wandb.sdk.wandb_run"


def listen(tell: Callable[[Mapping[str, Any]], None]) -> None:
    """Call ``tell`` with all that is logged from now on. Does nothing where wandb is not loaded, or is followed already."""
    kind = getattr(sys.modules.get(MODULE), "Run", None)
    log = getattr(kind, "log", None)
    if kind is None or log is None or hasattr(log, "followed"):
        return

    @functools.wraps(log)
    def followed_log(self: Any, *args: Any, **kwargs: Any) -> Any:
        data = args[0] if args else kwargs.get("data")
        if isinstance(data, Mapping):
            tell(data)
        return log(self, *args, **kwargs)

    followed_log.followed = True  # type: ignore[attr-defined]
    kind.log = followed_log
