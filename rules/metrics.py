"""The daemon's own metrics (prefix ``trainwarden_``), on a registry of its own.

Every label set exists at 0 from the start: a labelled counter that first appears at 1 has no increase.
"""

from __future__ import annotations

import platform
from collections.abc import Callable, Iterator
from typing import get_args

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, disable_created_metrics
from prometheus_client.core import GaugeMetricFamily
from prometheus_client.exposition import CONTENT_TYPE_LATEST, generate_latest
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

import trainwarden
from trainwarden.rules.notifiers import Reason
from trainwarden.rules.sources.exporter import Outcome

RECEIPTS = ("accepted", "duplicate", "refused", "executed", "expired", "failed", "undeliverable")
MISFIRES = ("missed", "max_instances", "error")
_SECONDS = (0.0001, 0.001, 0.005, 0.02, 0.1, 0.5, 2.0, 10.0)


class Metrics:
    """The counters and gauges that the daemon's threads write, and :meth:`page`, which is what a scrape reads."""

    def __init__(self) -> None:
        disable_created_metrics()  # type: ignore[no-untyped-call]
        self.registry = CollectorRegistry()
        self.records = self._counter("records", "Step records fed to the core.")
        self.events = self._counter("events", "Event lines fed to the core.")
        self.polls = self._counter("source_polls", "Polls of sources by how they ended.", "outcome", get_args(Outcome))
        self.malformed_lines = self._counter("source_malformed_lines", "Lines of sources that could not be read.")
        self.missing_lines = self._counter("source_missing_lines", "Lines that a source did not have any more.")
        self.ticks_dropped = self._counter("ticks_dropped", "Ticks that found the queue full.")
        self.misfires = self._counter("schedule_misfires", "Timed jobs that did not run as planned.", "kind", MISFIRES)
        self.core_failures = self._counter("rule_evaluation_failures", "Inputs that the core could not take.")
        self.feed_seconds = self._histogram("rule_evaluation_duration", "Time to feed one queue item to the core.")
        self.snapshot_seconds = self._histogram("snapshot_duration", "Time to write one transaction.")
        self.snapshot_failures = self._counter("snapshot_failures", "Transactions that could not be written.")
        self.snapshot_bytes = self._gauge("snapshot_size_bytes", "Size of the core's state at the last transaction.")
        self.snapshot_time = self._gauge("last_snapshot_timestamp_seconds", "When the last transaction was written.")
        self.notifications = self._counter_of("notifications", "Deliveries tried, by integration.", ("integration",))
        self.notifications_failed = self._counter_of(
            "notifications_failed", "Deliveries that failed, by integration and reason.", ("integration", "reason")
        )
        self.notification_seconds = Histogram(
            "trainwarden_notification_latency_seconds",
            "Time from the making of a message to its delivery.",
            ("integration",),
            registry=self.registry,
            buckets=(0.1, 0.5, 1.0, 5.0, 30.0, 120.0, 600.0),
        )
        self.receipts = self._counter("receipts", "Answers of the receiver by status.", "status", RECEIPTS)
        self.config_time = self._gauge(
            "config_last_reload_success_timestamp_seconds", "When the configuration was last read without an error."
        )
        info = self._gauge("build_info", "Version of the daemon.", ("version", "python"))
        info.labels(trainwarden.__version__, platform.python_version()).set(1)

    def integration(self, name: str) -> None:
        """Let a configured integration's series exist at 0."""
        self.notifications.labels(name)
        self.notification_seconds.labels(name)
        for reason in get_args(Reason):
            self.notifications_failed.labels(name, reason)

    def watch(self, name: str, help: str, read: Callable[[], float]) -> None:
        """Add a gauge that is read at each scrape."""
        self._gauge(name, help).set_function(read)

    def watch_by(
        self, name: str, help: str, label: str, values: tuple[str, ...], read: Callable[[], dict[str, int]]
    ) -> None:
        """Add a gauge with one label that is read at each scrape; ``values`` are there even at 0."""
        self.registry.register(_Labelled(f"trainwarden_{name}", help, label, values, read))

    def page(self) -> tuple[bytes, str]:
        """Return the page and its content type."""
        return generate_latest(self.registry), CONTENT_TYPE_LATEST

    def malformed(self, lines: int) -> None:
        """Count lines that could not be read."""
        self.malformed_lines.inc(lines)

    def missing(self, lines: int) -> None:
        """Count lines that a source did not have any more."""
        self.missing_lines.inc(lines)

    def _counter(self, name: str, help: str, label: str = "", values: tuple[str, ...] = ()) -> Counter:
        counter = self._counter_of(name, help, (label,) if label else ())
        for value in values:
            counter.labels(value)
        return counter

    def _counter_of(self, name: str, help: str, labels: tuple[str, ...]) -> Counter:
        return Counter(f"trainwarden_{name}_total", help, labels, registry=self.registry)

    def _gauge(self, name: str, help: str, labels: tuple[str, ...] = ()) -> Gauge:
        return Gauge(f"trainwarden_{name}", help, labels, registry=self.registry)

    def _histogram(self, name: str, help: str) -> Histogram:
        return Histogram(f"trainwarden_{name}_seconds", help, registry=self.registry, buckets=_SECONDS)


class _Labelled(Collector):
    def __init__(
        self, name: str, help: str, label: str, values: tuple[str, ...], read: Callable[[], dict[str, int]]
    ) -> None:
        self._name, self._help, self._label, self._values, self._read = name, help, label, values, read

    def collect(self) -> Iterator[Metric]:
        family = GaugeMetricFamily(self._name, self._help, labels=(self._label,))
        for value, count in {**dict.fromkeys(self._values, 0), **self._read()}.items():
            family.add_metric((value,), count)
        yield family

    def describe(self) -> Iterator[Metric]:
        yield GaugeMetricFamily(self._name, self._help, labels=(self._label,))
