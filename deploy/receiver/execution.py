"""Carries accepted requests out, one small repeatable step at a time, until each has an end.

:meth:`Execution.advance` looks at how the run *is* and does what is missing, so that it may be interrupted anywhere and begun
again by the next process: (1) the row is there, (2) plan and ledger entry lie in the run's folder, (3) the scheduler
has been asked, (4) the next attempt's process is up. Nothing is asked twice with another effect: the scheduler obeys only for
the newest attempt.
"""

from __future__ import annotations

import threading
import time
from datetime import UTC, datetime
from pathlib import Path

import structlog

from trainwarden.plan import RESTARTING_ACTIONS, PlanError
from trainwarden.runfolder import RunFolder
from trainwarden.webhook import Request, decode_envelope, expired

from . import planfiles
from .ledger import DatabaseError, Ledger, Row, Status
from .metrics import Metrics
from .schedulers.scheduler import Scheduler, SchedulerError, Situation, StaleError

_log = structlog.get_logger("receiver")

#: How often a request under way is looked at, how long to wait after trouble with the ledger, and how often old
#: rows are forgotten, in seconds.
PACE = 0.25
PAUSE = 5.0
TIDY_EVERY = 3600.0


class Execution:
    """Carries requests out on a thread of its own. :meth:`start` it, :meth:`wake` it after an acceptance, :meth:`finish` it."""

    def __init__(self, ledger: Ledger, scheduler: Scheduler, metrics: Metrics) -> None:
        self._thread = threading.Thread(target=self._run, name="execution", daemon=True)
        self._ledger = ledger
        self._scheduler = scheduler
        self._metrics = metrics
        self._woken = threading.Event()
        self._over = False
        self._troubles: dict[str, str] = {}

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def works(self) -> bool:
        """Say whether the thread is alive."""
        return self._thread.is_alive()

    def wake(self) -> None:
        """Look at the ledger now."""
        self._woken.set()

    def finish(self) -> None:
        """End the thread after its present step; what is under way goes on with the next process."""
        self._over = True
        self._woken.set()
        self._thread.join(15)

    def _run(self) -> None:
        tidy = 0.0
        while not self._over:
            pending: list[Row] = []
            try:
                pending = self._ledger.pending()
                for row in pending:
                    self._try(row)
                if time.monotonic() >= tidy:
                    self._ledger.forget(time.time())
                    tidy = time.monotonic() + TIDY_EVERY
            except DatabaseError as error:  # a full disk: the rows are still there when it has room again
                _log.error("ledger", detail=str(error))
                self._woken.wait(PAUSE)
            self._woken.wait(PACE if pending else 30.0)
            self._woken.clear()

    def _try(self, row: Row) -> None:
        try:
            self.advance(row, datetime.now(UTC))
        except DatabaseError:
            raise
        except Exception as error:  # one poisoned row must not keep the others waiting
            self._trouble(row, f"{type(error).__name__}: {error}")

    def advance(self, row: Row, now: datetime) -> None:
        """Do what is missing for one accepted request. Safe to repeat at any time."""
        request = decode_envelope(row.body).data
        run = RunFolder(row.run, Path(row.folder).parent)
        if row.action == "pin":
            self._settle(row, "executed", detail="recorded")
            return
        try:
            situation = self._scheduler.look(run)
            if row.action in RESTARTING_ACTIONS:
                self._roll_back(row, request, run, situation, now)
            elif row.action == "stop":
                self._stop(row, request, run, situation, now)
            else:
                self._change(row, request, run, situation, now)
        except SchedulerError as error:
            if expired(request, now):
                self._give_up(row, request, run, str(error))
            else:
                self._trouble(row, str(error))
        except StaleError as error:
            # The next look shows which attempt it is, unless somebody starts attempts past the scheduler.
            if expired(request, now):
                self._settle(row, "failed", "stale", str(error))

    def _roll_back(self, row: Row, request: Request, run: RunFolder, situation: Situation, now: datetime) -> None:
        plan = request.plan
        if situation.attempt >= plan.for_attempt:
            if not planfiles.written(run, plan):
                self._settle(row, "failed", "stale", f"attempt {situation.attempt} began before the plan was written")
                return
            planfiles.write(run, plan)
            if situation.attempt == plan.for_attempt and situation.error:
                self._settle(row, "failed", "not_restartable", situation.error)
            elif situation.attempt > plan.for_attempt or situation.state != "moving":
                self._settle(row, "executed", detail=f"attempt {plan.for_attempt} is up")
        elif situation.state == "over":
            self._give_up(row, request, run, "the run ended by itself")
        elif situation.request_id == row.id:
            return  # being ended
        elif expired(request, now) or situation.cannot:
            with self._scheduler.frozen(run, row.attempt):
                planfiles.take_back(run, plan)
            if situation.cannot:
                self._settle(row, "failed", "not_restartable", situation.cannot)
            else:
                self._settle(row, "expired", "expired", f"expires_at was {request.expires_at}")
        else:
            try:
                with self._scheduler.frozen(run, row.attempt):
                    planfiles.write(run, plan)
            except (OSError, PlanError) as error:  # after a restart of this process on a disk that has filled up
                self._settle(row, "failed", "no_space", f"the plan cannot be written: {error}")
                return
            self._scheduler.restart(run, row.attempt, plan.for_attempt, row.id)

    def _stop(self, row: Row, request: Request, run: RunFolder, situation: Situation, now: datetime) -> None:
        if situation.attempt > row.attempt:
            self._settle(row, "failed", "stale", f"attempt {situation.attempt} has begun meanwhile")
        elif situation.state == "over":
            self._settle(row, "executed", detail=f"attempt {row.attempt} is over")
        elif situation.request_id == row.id:
            return
        elif expired(request, now):
            self._settle(row, "expired", "expired", f"expires_at was {request.expires_at}")
        else:
            self._scheduler.stop(run, row.attempt, row.id)

    def _change(self, row: Row, request: Request, run: RunFolder, situation: Situation, now: datetime) -> None:
        """A soft action: the plan file is all there is to do; the exporters watch for it."""
        if situation.attempt != row.attempt:
            self._settle(row, "failed", "stale", f"attempt {situation.attempt} is the newest one")
            return
        if expired(request, now):
            self._settle(row, "expired", "expired", f"expires_at was {request.expires_at}")
            return
        try:
            planfiles.write(run, request.plan)
        except OSError as error:
            self._settle(row, "failed", "no_space", f"the plan cannot be written: {error}")
            return
        self._settle(row, "executed", detail=str(planfiles.plan_path(run, request.plan)))

    def _give_up(self, row: Row, request: Request, run: RunFolder, why: str) -> None:
        stays = row.action in RESTARTING_ACTIONS and planfiles.written(run, request.plan)
        kept = "; the plan stays in the run's folder and its next start applies it" if stays else ""
        self._settle(row, "failed", "unreachable", why + kept)

    def _settle(self, row: Row, status: Status, reason: str = "", detail: str = "") -> None:
        self._ledger.settle(row.id, status, time.time(), reason, detail)
        self._metrics.ends.labels(row.action, status).inc()
        self._troubles.pop(row.id, None)
        _log.info(status, id=row.id, run=row.run, attempt=row.attempt, action=row.action, reason=reason, detail=detail)

    def _trouble(self, row: Row, says: str) -> None:
        """Log a trouble once as long as it stays the same."""
        if self._troubles.get(row.id) != says:
            self._troubles[row.id] = says
            _log.warning("waiting", id=row.id, run=row.run, attempt=row.attempt, action=row.action, detail=says)
