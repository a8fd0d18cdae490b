"""Delivery threads: they claim due messages from the outbox, hand them to a notifier, and settle them.

A message is tried until its destination took it, said a final no, or it expired. Between two tries lies an exponential
back-off with jitter, or what the destination asked for. What a receiver says becomes a Receipt for the core, journalled in the
transaction that settles the row. The same failure is logged once while it lasts.
"""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any, cast

import structlog

from trainwarden.rules.core.effects import Deliver
from trainwarden.rules.core.inputs import Receipt
from trainwarden.rules.daemon.inbox import Inbox, Received
from trainwarden.rules.metrics import Metrics
from trainwarden.rules.notifiers import Answer, Followed, Notifier
from trainwarden.rules.outbox import Outbox, Row
from trainwarden.rules.store import StoreError

FIRST_WAIT = 1.0
LONGEST_WAIT = 30.0
#: Seconds between two looks at how a request ended; and for how long it is looked after, once it was accepted.
FOLLOW_WAIT = 2.0
FOLLOW_SECONDS = 24 * 3600.0
_FINAL = ("refused", "executed", "expired", "failed", "undeliverable")


def back_off(attempts: int, retry_after: float | None, jitter: float) -> float:
    """Return the seconds until the next try after ``attempts`` failed ones; ``jitter`` is in [0, 1)."""
    wait = min(FIRST_WAIT * 2.0 ** min(attempts, 10), LONGEST_WAIT) * (0.5 + 0.5 * jitter)
    return max(wait, retry_after or 0.0)


class Delivery:
    """``notifiers`` maps destinations to notifiers; messages of kind webhook go to ``receiver``, others to all the rest."""

    def __init__(
        self,
        outbox: Outbox,
        inbox: Inbox,
        notifiers: Mapping[str, Notifier],
        metrics: Metrics,
        *,
        threads: int = 2,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._outbox = outbox
        self._inbox = inbox
        self._notifiers = notifiers
        self._metrics = metrics
        self._clock = clock
        self._log = structlog.get_logger("delivery")
        self._wakeup = threading.Condition()
        self._stopping = False
        self._disabled: set[str] = set()
        self._failing: dict[tuple[str, str], str] = {}
        self._threads = [
            threading.Thread(target=self._work, name=f"delivery-{number}", daemon=True) for number in range(threads)
        ]
        for notifier in notifiers.values():
            metrics.integration(notifier.integration)

    def destinations(self, message: Deliver) -> tuple[str, ...]:
        """Return where a message goes."""
        if message.kind == "webhook":
            return ("receiver",)
        return tuple(name for name in self._notifiers if name != "receiver")

    def start(self) -> None:
        """Release what a dead process had claimed, and start the threads."""
        released = self._outbox.release()
        if released:
            self._log.info("deliveries that a crash interrupted are made again", messages=released)
        for thread in self._threads:
            thread.start()

    def wake(self) -> None:
        """Say that there may be something to deliver now."""
        with self._wakeup:
            self._wakeup.notify_all()

    def stop(self, seconds: float = 5.0) -> None:
        """Let running deliveries end, and start no more; what waits is delivered after the next start."""
        with self._wakeup:
            self._stopping = True
            self._wakeup.notify_all()
        end = time.monotonic() + seconds
        for thread in self._threads:
            thread.join(max(0.0, end - time.monotonic()))

    def _work(self) -> None:
        while not self._stopping:
            try:
                row = self._outbox.claim(self._clock())
                if row is not None:
                    self.handle(row)
                    continue
                due = self._outbox.next_due()
                wait = 5.0 if due is None else min(max(due - self._clock(), 0.02), 5.0)
            except StoreError as error:
                if self._stopping:
                    return  # the store was closed: what was being delivered is delivered again after the next start
                self._log.error("the outbox cannot be used now", error=str(error))
                wait = 5.0
            except Exception:
                self._log.exception("a delivery failed unexpectedly; the message stays claimed for a while")
                wait = 1.0
            with self._wakeup:
                if not self._stopping:
                    self._wakeup.wait(wait)

    def handle(self, row: Row) -> None:
        """Make one try at a claimed row and settle it."""
        now = self._clock()
        notifier = self._notifiers.get(row.destination)
        if notifier is None or row.destination in self._disabled:
            gone = "no receiver is configured" if notifier is None else "the receiver said that it is gone for good"
            self._finish(row, now, "undeliverable", "disabled" if notifier else "no_receiver", gone)
            return
        if row.phase == "follow":
            self._follow(row, now, cast(Followed, notifier))
            return
        if row.expires_at is not None and now > row.expires_at:
            self._finish(row, now, "expired", "not_delivered", self._failing.get((row.key, row.destination), ""))
            return
        answer = self._try(lambda: notifier.deliver(row, now))
        self._metrics.notifications.labels(notifier.integration).inc()
        if answer.reason is None:
            self._metrics.notification_seconds.labels(notifier.integration).observe(max(0.0, now - row.created))
        else:
            self._metrics.notifications_failed.labels(notifier.integration, answer.reason).inc()
        now = self._clock()
        if answer.reason == "gone":
            self._disabled.add(row.destination)
            self._log.error("the destination is gone for good (410): nothing more is sent there", to=row.destination)
        if answer.retryable:
            wait = back_off(row.attempts, answer.retry_after, random.random())
            next_at = now + wait if row.expires_at is None else min(now + wait, row.expires_at + 0.001)
            self._say(row, answer.error)
            self._outbox.settle(row, now, phase="deliver", next_at=next_at, error=answer.error)
        elif row.kind != "webhook":
            if answer.error:
                self._say(row, answer.error)
            self._outbox.settle(
                row, now, phase="done", status="failed" if answer.reason else "sent", error=answer.error
            )
        elif answer.status in _FINAL:
            self._finish(
                row, now, answer.status, answer.because or (answer.reason or ""), answer.detail or answer.error
            )
        else:
            self._log.info("delivered", to=row.destination, id=row.key, run=row.run, answer=answer.status)
            self._settle(row, now, "follow", now + FOLLOW_WAIT, answer)

    def _follow(self, row: Row, now: float, notifier: Followed) -> None:
        answer = self._try(lambda: notifier.follow(row, now))
        now = self._clock()
        if answer.status in _FINAL:
            self._finish(row, now, answer.status, answer.because, answer.detail)
        elif now > row.created + FOLLOW_SECONDS:
            self._finish(row, now, "failed", "unknown_end", "the receiver never said how it ended")
        else:
            if answer.error:
                self._say(row, answer.error)
            wait = min(FOLLOW_WAIT * (1 + row.attempts / 10), LONGEST_WAIT)
            changed = answer.status is not None and answer.status != row.status and row.status != "duplicate"
            self._settle(row, now, "follow", now + wait, answer if changed else Answer(error=answer.error))

    def _try(self, call: Callable[[], Answer]) -> Answer:
        try:
            return call()
        except Exception as error:
            self._log.exception("a notifier failed; this is a fault of its own")
            return Answer(reason="config", error=f"{type(error).__name__}: {error}", retryable=True)

    def _finish(self, row: Row, now: float, status: str | None, because: str, detail: str) -> None:
        level = self._log.info if status == "executed" else self._log.warning
        level("a request ended", id=row.key, run=row.run, status=status, reason=because, detail=detail)
        if row.kind == "webhook":
            self._settle(row, now, "done", now, Answer(status=cast(Any, status), because=because, detail=detail))
        else:
            self._outbox.settle(row, now, phase="done", status=status or "", error=detail)
        self._failing.pop((row.key, row.destination), None)

    def _settle(self, row: Row, now: float, phase: Any, next_at: float, answer: Answer) -> None:
        receipt = None
        if answer.status is not None:
            receipt = Receipt(row.key, answer.status, now, answer.because, answer.detail)
            self._metrics.receipts.labels(answer.status).inc()
        identity = self._outbox.settle(
            row, now, phase=phase, next_at=next_at, status=answer.status or "", error=answer.error, receipt=receipt
        )
        if identity is not None and receipt is not None:
            self._inbox.put(Received(identity, receipt))

    def _say(self, row: Row, error: str) -> None:
        if self._failing.get((row.key, row.destination)) != error:
            self._failing[row.key, row.destination] = error
            self._log.warning("delivery failed", to=row.destination, id=row.key, run=row.run, error=error)
