"""Notifiers: one file each. A notifier carries one message to one destination and says how that went, nothing else.

It does not retry, sleep, log or remember: the delivery threads do, the same for all.
"""

from __future__ import annotations

from typing import Literal, Protocol, TypeAlias

import msgspec

from trainwarden.rules.outbox import Row

#: Why a delivery failed: a closed set that becomes a metric label.
Reason: TypeAlias = Literal[
    "connect", "timeout", "redirect", "auth", "rate_limited", "client_error", "gone", "server_error", "answer", "config"
]

ReceiptStatus: TypeAlias = Literal["accepted", "duplicate", "refused", "executed", "expired", "failed", "undeliverable"]


class Answer(msgspec.Struct, frozen=True, kw_only=True):
    """How one delivery went: done (``reason`` is None), to be tried again (``retryable``), or never.

    ``retry_after`` is the wait that the other end asked for, in seconds. ``status``, ``because`` and ``detail`` are
    the receiver's word about a request, where the destination is one.
    """

    reason: Reason | None = None
    error: str = ""
    retryable: bool = False
    retry_after: float | None = None
    status: ReceiptStatus | None = None
    because: str = ""
    detail: str = ""


class Notifier(Protocol):
    """One destination. ``integration`` is its name in metrics."""

    integration: str

    def deliver(self, row: Row, now: float) -> Answer:
        """Carry the message there. Called from several threads."""


class Followed(Notifier, Protocol):
    """A destination that can be asked later what became of a message."""

    def follow(self, row: Row, now: float) -> Answer:
        """Ask what became of the message; an Answer without ``status`` means: not known yet."""
