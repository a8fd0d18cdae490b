"""A webhook comes in: verified, fenced, written down, answered. It ends nothing itself; ``execution`` does that later.

The order of the checks is the contract: size (the app), signature and age, body, duplicate, expiry, run, fence, attempt,
plan, target, space, scheduler. A refusal changes nothing and does not take the fence.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import msgspec
import structlog

from trainwarden.plan import ENDING_ACTIONS, RESTARTING_ACTIONS, PlanError
from trainwarden.runfolder import RunFolder
from trainwarden.webhook import Envelope, WebhookError, decode_envelope, verify

from . import planfiles, verification
from .ledger import FencedError, Ledger, Row
from .metrics import Metrics
from .refusals import RefusedError
from .schedulers.scheduler import Scheduler, SchedulerError, StaleError

_log = structlog.get_logger("receiver")


class Reply(msgspec.Struct, frozen=True):
    """An HTTP answer: status code and JSON object."""

    code: int
    body: dict[str, Any]


class Intake:
    """Answers webhooks. Safe for several threads: one request of a run at a time."""

    def __init__(
        self,
        ledger: Ledger,
        scheduler: Scheduler,
        secrets: list[str],
        roots: list[Path],
        checkpoints: list[Path],
        metrics: Metrics,
        wake: Callable[[], None],
    ) -> None:
        """``wake`` is called after each acceptance."""
        self._ledger = ledger
        self._scheduler = scheduler
        self._secrets = secrets
        self._roots = roots
        self._checkpoints = checkpoints
        self._metrics = metrics
        self._wake = wake
        self._locks: dict[str, threading.Lock] = {}

    def take(self, headers: Mapping[str, str], body: bytes) -> Reply:
        """Verify one request and answer it; see the module for the order."""
        now = datetime.now(UTC)
        try:
            request_id = verify(self._secrets, headers, body, now)
        except WebhookError as error:
            _log.warning("unauthorized", detail=str(error))
            return self._reply(401, "unauthorized", detail=str(error))
        self._metrics.last_request.set(now.timestamp())
        try:
            envelope = decode_envelope(body)
            with self._locks.setdefault(envelope.data.run_uid, threading.Lock()):
                return self._judge(request_id, envelope, body, now)
        except WebhookError as error:
            _log.warning("invalid", id=request_id, detail=str(error))
            return self._reply(400, "invalid", id=request_id, detail=str(error))

    def _judge(self, request_id: str, envelope: Envelope, body: bytes, now: datetime) -> Reply:
        plan_id = envelope.data.plan.plan_id
        try:
            known = self._ledger.find(request_id)
            if known is not None:
                data = envelope.data
                if (known.run_uid, known.attempt, known.action) != (data.run_uid, data.attempt, envelope.action):
                    raise RefusedError("id_reused", f"{request_id} is a {known.action} of attempt {known.attempt}")
                return self._reply(200, "duplicate", id=request_id)
            before = self._ledger.refusal(request_id, body)
            if before is not None:
                return self._refused(request_id, before.reason, before.detail)
            verification.check_expiry(envelope.data, now)
            self._accept(request_id, envelope, body, now)
        except RefusedError as refusal:
            self._ledger.refuse(request_id, body, plan_id, refusal.reason, refusal.detail, now.timestamp())
            self._metrics.refusals.labels(refusal.reason).inc()
            _log.warning(
                "refused",
                id=request_id,
                run=envelope.data.run,
                attempt=envelope.data.attempt,
                action=envelope.action,
                reason=refusal.reason,
                detail=refusal.detail,
            )
            return self._refused(request_id, refusal.reason, refusal.detail)
        _log.info(
            "accepted",
            id=request_id,
            run=envelope.data.run,
            attempt=envelope.data.attempt,
            action=envelope.action,
            plan_id=plan_id,
            incident=envelope.data.incident,
        )
        self._wake()
        return self._reply(202, "accepted", id=request_id)

    def _accept(self, request_id: str, envelope: Envelope, body: bytes, now: datetime) -> None:
        request, action = envelope.data, envelope.action
        run = verification.find_run(request, self._roots)
        winner = self._ledger.winner(request.run_uid, request.attempt)
        if action in ENDING_ACTIONS and winner is not None:
            raise RefusedError("fenced", f"request {winner} ends attempt {request.attempt} already")
        row = Row(
            id=request_id,
            run_uid=request.run_uid,
            run=request.run,
            attempt=request.attempt,
            action=action,
            plan_id=request.plan.plan_id,
            folder=str(run.path),
            body=body,
            status="accepted",
            received=now.timestamp(),
            updated=now.timestamp(),
        )
        if action == "pin":
            verification.check_plan(request, action)
            self._write(row)
            return
        try:
            situation = self._scheduler.look(run)
            verification.check_attempt(request, situation)
            verification.check_plan(request, action)
            if action == "lower_lr":
                verification.check_new(run, request.plan)
            if action in RESTARTING_ACTIONS:
                verification.check_restart(request, situation)
                verification.check_targets(run, request.plan, situation.folder, self._checkpoints)
            if action != "stop":
                verification.check_space(run, request.plan)
            # Looked at again with the next start held back: what is verified here is what will be carried out.
            with self._scheduler.frozen(run, request.attempt) as situation:
                verification.check_attempt(request, situation)
                if action in RESTARTING_ACTIONS:
                    verification.check_restart(request, situation)
                    self._write_with_plan(row, run, envelope)
                else:
                    self._write(row)
        except SchedulerError as error:
            raise RefusedError("unreachable", str(error)) from None
        except StaleError as error:
            raise RefusedError("stale", str(error)) from None

    def _write(self, row: Row) -> None:
        try:
            self._ledger.accept(row)
        except FencedError as error:
            raise RefusedError("fenced", f"request {error} ends attempt {row.attempt} already") from None

    def _write_with_plan(self, row: Row, run: RunFolder, envelope: Envelope) -> None:
        """Write the row and then the plan; where the plan cannot be written, undo both: nothing has been ended yet."""
        plan = envelope.data.plan
        other = planfiles.rival(run, plan)
        if other is not None:
            raise RefusedError(
                "fenced", f"plan {other} for attempt {plan.for_attempt} lies in the run's folder already"
            )
        self._write(row)
        try:
            planfiles.write(run, plan)
        except (OSError, PlanError) as error:
            try:
                planfiles.take_back(run, plan)
            except (OSError, PlanError) as again:
                _log.error("plan left behind", path=str(planfiles.plan_path(run, plan)), detail=str(again))
            self._ledger.withdraw(row.id)
            raise RefusedError("no_space", f"the plan cannot be written: {error}") from None

    def _refused(self, request_id: str, reason: str, detail: str) -> Reply:
        return self._reply(409, "refused", id=request_id, reason=reason, detail=detail)

    def _reply(self, code: int, status: str, **fields: str) -> Reply:
        self._metrics.requests.labels(status).inc()
        return Reply(code, {"status": status, **fields})
