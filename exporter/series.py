"""The Prometheus page: a collector of its own over the last records, derived from the table of signals.

Every label set exists from the start: counters at 0 (one that first appears at 1 has no increase), gauges at NaN until they are
measured (a 0 would be a value: a loss of 0, a checkpoint of 1970). The ``…_window_…`` gauges are extremes over a trailing wall-clock
window that no scrape resets: a spike of one step survives a scrape every 15 seconds, and any number of scrapers. No sample
carries a timestamp, no name of a shard is a label.
"""

from __future__ import annotations

import math
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, InfoMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector
from prometheus_client.samples import Exemplar

from trainwarden.record import Event, Step, Value
from trainwarden.signals import BY_NAME, DERIVED, LABEL_VALUES, OTHER_SOURCES, PHASES, SIGNALS, WINDOW_SECONDS, Signal

Labels = tuple[str, ...]

#: The signals that the exporter itself measures; the others come from other tools' logs and have no series here.
PROBED = tuple(signal for signal in SIGNALS if signal.probed)

#: A window is kept in buckets of this many seconds: its memory does not grow with the rate of the steps.
BUCKET_SECONDS = 0.25
#: Decay of the loss's moving average: the classic rule of 1.5 x EMA(0.98).
EMA_BETA = 0.98
#: Gauges that are 0 before anything was measured: no step yet, in no such phase, nothing staged.
ZERO = frozenset({"train_step", "train_phase", "train_exporter_lag_steps"})
#: Longest exemplar that OpenMetrics allows, names and values together.
EXEMPLAR_CHARACTERS = 128


class Window:
    """Extremes of a signal over the last :data:`WINDOW_SECONDS`. NaN is left out: a counter tells of it."""

    def __init__(self, seconds: float = WINDOW_SECONDS) -> None:
        self._seconds = seconds
        self._buckets: deque[tuple[float, float, float]] = deque()  # begin, smallest, largest
        self._last = math.nan

    def add(self, value: float, now: float) -> None:
        """Add one step's value, seen at ``now`` (monotonic seconds)."""
        if math.isnan(value):
            return
        self._last = value
        if self._buckets and now - self._buckets[-1][0] < BUCKET_SECONDS:
            begin, low, high = self._buckets[-1]
            self._buckets[-1] = (begin, min(low, value), max(high, value))
        else:
            self._buckets.append((now, value, value))
        self._expire(now)

    def _expire(self, now: float) -> None:
        while self._buckets and self._buckets[0][0] + BUCKET_SECONDS < now - self._seconds:
            self._buckets.popleft()

    def extremes(self, now: float) -> tuple[float, float]:
        """Return (smallest, largest); without a value in the window both are the last one there was, NaN if none was."""
        self._expire(now)
        if not self._buckets:
            return self._last, self._last
        return min(bucket[1] for bucket in self._buckets), max(bucket[2] for bucket in self._buckets)


class Page(Collector):
    """What ``/metrics`` shows. The drain thread feeds it, the HTTP threads collect from it."""

    def __init__(
        self,
        run: str,
        rank: int,
        max_series: int = 1000,
        window_seconds: float = WINDOW_SECONDS,
        sources: Sequence[str] = (),
        say: Callable[[str], None] = lambda sentence: None,
    ) -> None:
        self._say = say
        self._base: Labels = (run, str(rank))
        self._limit = max_series
        self._sources = (*sources, OTHER_SOURCES)
        #: Gives the exporter's own numbers (series name to value) at the time of a scrape.
        self.own: Callable[[], dict[str, float]] = dict
        self._lock = threading.Lock()
        self._values: dict[str, dict[Labels, float]] = {}
        self._count = 0
        self._refused: set[tuple[str, Labels]] = set()
        self._info: dict[str, str] = {}
        self._exemplar: Exemplar | None = None
        self._loss = Window(window_seconds)
        self._grad = Window(window_seconds)
        self._ema = 0.0
        self._weight = 0.0
        for signal in PROBED:
            # What is read by the clock is there once the machine has it: no GPU, no series.
            for labels in self._known_labels(signal) if signal.per != "clock" else ():
                self._put(signal.series, labels, _first(signal.series, signal.type))
        for series in DERIVED:
            for labels in _label_sets(series.labels):
                self._put(series.name, labels, _first(series.name, series.type))

    def _known_labels(self, signal: Signal) -> list[Labels]:
        if signal.name == "source_share":
            return [(name,) for name in self._sources]
        # Rates go by the optimizer's parameter groups, whose names are not known beforehand.
        return [("all",)] if signal.name == "lr" else _label_sets(signal.labels)

    @property
    def dropped(self) -> int:
        """How many series were refused because of the limit."""
        return len(self._refused)

    def _put(self, series: str, labels: Labels, value: float, add: bool = False) -> None:
        values = self._values.setdefault(series, {})
        if labels not in values:
            if self._count >= self._limit:
                if not self._refused:
                    self._say(
                        f"more than {self._limit} series: {series} and what else comes is left off the page, and counted; raise max_series "
                        "where Prometheus can take them. The records hold all of it"
                    )
                self._refused.add((series, labels))
                return
            self._count += 1
        values[labels] = values.get(labels, 0.0) + value if add else value

    def identify(self, identity: dict[str, str]) -> None:
        """Set the labels of ``train_run_info``."""
        with self._lock:
            self._info = dict(identity)

    def phase(self, phase: str) -> None:
        """Show the phase that the process is in."""
        with self._lock:
            for name in PHASES:
                self._put("train_phase", (name,), 1.0 if name == phase else 0.0)

    def step(self, step: Step) -> None:
        """Take over a finished record."""
        now = time.monotonic()
        with self._lock:
            for signal in PROBED:
                value = step.signals.get(signal.name)
                if value is not None and signal.per != "clock":
                    self._signal(signal, value)
            self._put("train_step", (), float(step.step))
            self._put("train_steps_total", (), float(step.stride), add=True)
            self._put("train_last_step_timestamp_seconds", (), step.time)
            loss, norm = step.value("loss"), step.value("grad_norm")
            if loss is not None:
                self._loss.add(loss, now)
                if math.isfinite(loss):
                    self._ema = EMA_BETA * self._ema + (1 - EMA_BETA) * loss
                    self._weight = EMA_BETA * self._weight + (1 - EMA_BETA)
                average = self._ema / self._weight if self._weight else 0.0
                self._put("train_loss_ema_ratio", (), loss / average if average else math.nan)
            if norm is not None:
                self._grad.add(norm, now)
            if step.shards:
                name = step.shards[-1].name[-(EXEMPLAR_CHARACTERS - len("shard")) :]
                self._exemplar = Exemplar({"shard": name}, step.value("samples_seen") or 0.0, step.time)

    def measured(self, signals: Mapping[str, Value]) -> None:
        """Take over what was read by the clock, whatever the steps do; of counters the increments."""
        with self._lock:
            for name, value in signals.items():
                self._signal(BY_NAME[name], value)

    def _signal(self, signal: Signal, value: Value) -> None:
        if signal.name == "source_share":
            value = self._configured(value)
        add = signal.type == "counter" and not signal.cumulative
        for labels, number in _flatten(value, len(signal.labels)):
            if signal.type == "counter" and not number >= 0:
                continue
            self._put(signal.series, labels, number, add=add)

    def _configured(self, shares: Value) -> Value:
        """Return the shares of the configured sources, 0 where the batch has none of one, and of all others together."""
        if not isinstance(shares, dict):
            return {}
        found: dict[str, Value] = dict.fromkeys(self._sources, 0.0)
        for name, share in shares.items():
            known = name if name in found else OTHER_SOURCES
            found[known] = _number(found[known]) + _number(share)
        return found

    def event(self, event: Event) -> None:
        """Take over an event; a complete checkpoint is shown."""
        if event.kind == "checkpoint" and event.fields.get("complete") is True:
            with self._lock:
                self._put("train_checkpoint_last_step", (), float(event.step or 0))
                self._put("train_checkpoint_last_timestamp_seconds", (), event.time)

    def collect(self) -> Iterator[Metric]:
        """Yield all families as they are now."""
        for family in self.families():
            yield family.metric()

    def families(self) -> list[Family]:
        """Return all families as they are now. The series of one are only ever added to, at the end."""
        now = time.monotonic()
        with self._lock:
            loss, grad = self._loss.extremes(now), self._grad.extremes(now)
            self._put("train_loss_window_max", (), loss[1])
            self._put("train_grad_norm_window_max", (), grad[1])
            self._put("train_grad_norm_window_min", (), grad[0])
            own = {**self.own(), "train_exporter_dropped_series_total": float(len(self._refused))}
            for name, value in own.items():
                self._put(name, (), value)
            values = {name: dict(items) for name, items in self._values.items()}
            info, exemplar = dict(self._info), self._exemplar
        run, rank = self._base
        identity = Family("train_run", "Identity of the run; join it on run and rank.", "info", self._base)
        identity.info = {"run": run, "rank": rank, **info}
        found = [identity]
        for signal in PROBED:
            shown = exemplar if signal.name == "samples_seen" else None
            of_it = values.get(signal.series, {})
            found.append(Family(signal.series, signal.help, signal.type, self._base, signal.labels, of_it, shown))
        for series in DERIVED:
            of_it = values.get(series.name, {})
            found.append(Family(series.name, series.help, series.type, self._base, series.labels, of_it))
        return found


@dataclass(slots=True)
class Family:
    """The series of one name as they are at one moment. ``type`` is counter, gauge or info."""

    name: str
    help: str
    type: str
    base: Labels
    labels: Labels = ()
    values: dict[Labels, float] = field(default_factory=dict)
    exemplar: Exemplar | None = None
    info: dict[str, str] | None = None

    @property
    def fixed(self) -> bool:
        """Whether nothing of a series but its value can change."""
        return self.info is None and self.exemplar is None

    def metric(self) -> Metric:
        """Return it as the library's own kind."""
        if self.info is not None:
            return InfoMetricFamily(self.name, self.help, self.info)
        names = ("run", "rank", *self.labels)
        if self.type == "counter":
            counter = CounterMetricFamily(self.name.removesuffix("_total"), self.help, labels=names)
            for key, value in self.values.items():
                counter.add_metric((*self.base, *key), value, exemplar=self.exemplar)
            return counter
        gauge = GaugeMetricFamily(self.name, self.help, labels=names)
        for key, value in self.values.items():
            gauge.add_metric((*self.base, *key), value)
        return gauge


def _number(value: Value) -> float:
    return 0.0 if isinstance(value, dict) else float(value)


def _first(name: str, kind: str) -> float:
    """Return what a series shows before anything was measured."""
    return 0.0 if kind == "counter" or name in ZERO else math.nan


def _label_sets(names: tuple[str, ...]) -> list[Labels]:
    """Return every combination of the known values of some labels."""
    sets: list[Labels] = [()]
    for name in names:
        sets = [(*labels, value) for labels in sets for value in LABEL_VALUES[name]]
    return sets


def _flatten(value: Any, depth: int) -> Iterator[tuple[Labels, float]]:
    """Yield the label values and numbers of a signal with ``depth`` labels; a bare number is ``all``."""
    if depth == 0:
        if not isinstance(value, dict):
            yield (), float(value)
        return
    for key, inner in value.items() if isinstance(value, dict) else [("all", value)]:
        for labels, number in _flatten(inner, depth - 1):
            yield (key, *labels), number
