"""The receiver's own series, in a registry of its own."""

from __future__ import annotations

from collections.abc import Callable

from prometheus_client import CollectorRegistry, Counter, Gauge, generate_latest

from trainwarden.webhook import TYPE_OF

from .refusals import REASONS

ANSWERS = ("accepted", "duplicate", "refused", "unauthorized", "invalid", "too_large")
ENDS = ("executed", "failed", "expired")


class Metrics:
    """Counters of one receiver. Every label set exists at 0 from the start."""

    def __init__(self) -> None:
        self._registry = CollectorRegistry()
        self.requests = Counter(
            "trainwarden_receiver_requests",
            "Webhooks received, by answer.",
            ["answer"],
            registry=self._registry,
        )
        self.refusals = Counter(
            "trainwarden_receiver_refusals", "Requests refused, by reason.", ["reason"], registry=self._registry
        )
        self.ends = Counter(
            "trainwarden_receiver_ended_requests",
            "Accepted requests that came to an end, by action and end.",
            ["action", "end"],
            registry=self._registry,
        )
        self._pending = Gauge(
            "trainwarden_receiver_pending_requests", "Accepted requests being carried out.", registry=self._registry
        )
        self.last_request = Gauge(
            "trainwarden_receiver_last_request_timestamp_seconds",
            "Unix time of the last webhook whose signature was right, 0 before the first.",
            registry=self._registry,
        )
        for answer in ANSWERS:
            self.requests.labels(answer)
        for reason in REASONS:
            self.refusals.labels(reason)
        for action in TYPE_OF:
            for end in ENDS:
                self.ends.labels(action, end)

    def watch_pending(self, count: Callable[[], int]) -> None:
        """Read the number of pending requests from ``count`` at each scrape."""
        self._pending.set_function(count)

    def page(self) -> bytes:
        """Return the page in the text format."""
        return generate_latest(self._registry)
