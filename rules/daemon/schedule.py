"""The timer: APScheduler runs the ticks, polls and pruning, and does nothing but enqueue.

It keeps nothing over a restart and drops a job that comes too late, so nothing durable hangs on it; what it dropped is counted.
"""

from __future__ import annotations

from collections.abc import Callable

import structlog
from apscheduler.events import EVENT_JOB_ERROR, EVENT_JOB_MAX_INSTANCES, EVENT_JOB_MISSED, JobExecutionEvent
from apscheduler.executors.pool import ThreadPoolExecutor
from apscheduler.schedulers.background import BackgroundScheduler

from trainwarden.rules.metrics import Metrics

_KIND = {EVENT_JOB_MISSED: "missed", EVENT_JOB_MAX_INSTANCES: "max_instances", EVENT_JOB_ERROR: "error"}


class Schedule:
    """Calls functions at intervals, each never twice at once, late ones folded into one."""

    def __init__(self, metrics: Metrics) -> None:
        self._metrics = metrics
        self._log = structlog.get_logger("schedule")
        self._scheduler = BackgroundScheduler(
            executors={"default": ThreadPoolExecutor(3)},
            job_defaults={"coalesce": True, "max_instances": 1, "misfire_grace_time": 5},
            timezone="UTC",
        )
        self._scheduler.add_listener(self._heard, EVENT_JOB_MISSED | EVENT_JOB_MAX_INSTANCES | EVENT_JOB_ERROR)

    def every(self, seconds: float, name: str, call: Callable[[], None]) -> None:
        """Call ``call`` every ``seconds``."""
        self._scheduler.add_job(call, "interval", seconds=seconds, id=name, name=name)

    def start(self) -> None:
        """Start the timer's thread."""
        self._scheduler.start()

    def stop(self) -> None:
        """Stop it and wait for what is running."""
        if self._scheduler.running:
            self._scheduler.shutdown(wait=True)

    def _heard(self, event: JobExecutionEvent) -> None:
        kind = _KIND[event.code]
        self._metrics.misfires.labels(kind).inc()
        if kind == "error":
            self._log.error("a timed job failed", job=event.job_id, error=repr(event.exception))
        else:
            self._log.debug("a timed job did not run as planned", job=event.job_id, kind=kind)
