"""The daemon's log: structlog to stderr as logfmt or JSON, with the libraries' own warnings in the same shape."""

from __future__ import annotations

import logging
import sys
from collections.abc import MutableMapping
from typing import Any

import structlog


def set_up(level: str = "info", form: str = "logfmt") -> None:
    """Configure logging of this process; ``form`` is logfmt or json."""
    number = getattr(logging, level.upper())
    shared: list[Any] = [
        structlog.stdlib.add_logger_name,
        structlog.stdlib.add_log_level,
        structlog.processors.TimeStamper(fmt="iso", utc=True, key="ts"),
        structlog.processors.format_exc_info,
    ]
    renderer: Any = (
        structlog.processors.JSONRenderer()
        if form == "json"
        else structlog.processors.LogfmtRenderer(key_order=["ts", "level", "logger", "event"], bool_as_flag=False)
    )
    structlog.configure(
        processors=[
            structlog.stdlib.filter_by_level,
            *shared,
            structlog.stdlib.ProcessorFormatter.wrap_for_formatter,
        ],
        logger_factory=structlog.stdlib.LoggerFactory(),
        wrapper_class=structlog.stdlib.BoundLogger,
        cache_logger_on_first_use=True,
    )
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(
        structlog.stdlib.ProcessorFormatter(
            foreign_pre_chain=shared,
            processors=[structlog.stdlib.ProcessorFormatter.remove_processors_meta, _flat, renderer],
        )
    )
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(number)
    for noisy in ("apscheduler", "uvicorn", "urllib3", "asyncio"):
        logging.getLogger(noisy).setLevel(max(number, logging.WARNING))
    # The schedule counts and says what matters of these itself.
    logging.getLogger("apscheduler.scheduler").setLevel(logging.ERROR)
    logging.getLogger("apscheduler.executors").setLevel(logging.ERROR)


def _flat(logger: Any, name: str, event: MutableMapping[str, Any]) -> dict[str, Any]:
    """Make every value a text or number that logfmt can hold on one line."""
    return {
        key: value if isinstance(value, str | int | float | bool) or value is None else str(value)
        for key, value in event.items()
    }
