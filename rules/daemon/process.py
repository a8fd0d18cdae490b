"""The daemon as one process: its parts, put together, started in order and stopped in order."""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping
from typing import Any, get_args

import msgspec
import structlog

from trainwarden.rules.api import Api
from trainwarden.rules.commands import Commands
from trainwarden.rules.config import Config, ConfigError, ReceiverConfig, check_address, read_webhook_secret
from trainwarden.rules.core.effects import Query
from trainwarden.rules.core.inputs import Observation, Tick
from trainwarden.rules.core.state import IncidentState
from trainwarden.rules.daemon.delivery import Delivery
from trainwarden.rules.daemon.following import Follow, Following
from trainwarden.rules.daemon.inbox import Inbox, Received
from trainwarden.rules.daemon.live import CORE, Core, Live
from trainwarden.rules.daemon.polling import Polling
from trainwarden.rules.daemon.schedule import Schedule
from trainwarden.rules.metrics import Metrics
from trainwarden.rules.notifiers import Notifier
from trainwarden.rules.notifiers.log import LogNotifier
from trainwarden.rules.notifiers.webhook import WebhookNotifier
from trainwarden.rules.outbox import Outbox
from trainwarden.rules.sources.positions import Positions
from trainwarden.rules.store import Store, StoreError
from trainwarden.rules.windows import Windows

_PRUNE_SECONDS = 3600.0
#: Ticks begin at the latest this long after the start, also if some source has not been polled by then.
_FIRST_ROUND_SECONDS = 30.0
#: States of an incident (design of the life cycle); each is in the metrics from the start.
INCIDENT_STATES: tuple[str, ...] = get_args(IncidentState)


class Daemon:
    """Everything between :meth:`start` and :meth:`stop`.

    Raises:
        StoreError: the database is in use or cannot be used.
        ConfigError: a secret cannot be read.
        OSError: the address to listen on is taken.
    """

    def __init__(self, config: Config, pack: Any, *, core: Core = CORE, follow: Follow | None = None) -> None:
        self._config = config
        self._log = structlog.get_logger("daemon")
        notifiers = make_notifiers(config)
        self._store = Store(config.path(config.state))
        try:
            self._metrics = Metrics()
            self._metrics.config_time.set_to_current_time()
            self._inbox = Inbox(config.queue_size)
            self._positions = Positions(self._store.cursors())
            self._outbox = Outbox(self._store)
            self._delivery = Delivery(self._outbox, self._inbox, notifiers, self._metrics)
            self._live = Live(
                self._store,
                self._inbox,
                self._positions,
                msgspec.structs.replace(config.settings, receiver=config.receiver is not None),
                pack,
                self._metrics,
                snapshot_interval=config.snapshot_interval,
                destinations=self._delivery.destinations,
                wake=self._delivery.wake,
                query=no_evidence,
                core=core,
            )
            self._polling = Polling(config, self._positions, self._inbox.put, self._metrics)
            self._following = Following(
                follow or Follow(), self._positions, self._inbox.put, self._metrics, config.poll_interval
            )
            self._schedule = Schedule(self._metrics)
            self._windows = Windows(config.maintenance)
            token = None if config.act_token_file is None else config.path(config.act_token_file)
            commands = Commands(self._store, self._inbox, token)
            self._api = Api(self._store, self._metrics, self.unready, commands, check_address(config.listen))
        except BaseException:
            self._store.close()
            raise
        self._core_thread = threading.Thread(target=self._run_core, name="core", daemon=True)
        self._started = time.monotonic()
        #: Set when the daemon cannot go on by itself.
        self.broken = threading.Event()
        self.stopped = False

    @property
    def address(self) -> str:
        """Where the API listens: ``host:port``."""
        return self._api.address

    @property
    def unwritten(self) -> bool:
        """Whether the last transaction, at the end, could not be written."""
        return self._live.unwritten

    def start(self) -> None:
        """Load the last snapshot and start all threads.

        Raises:
            StoreError: the snapshot cannot be used; nothing was started.
        """
        self._watch()
        try:
            self._live.open()
        except BaseException:
            self._store.close()
            raise
        self._core_thread.start()
        self._delivery.start()
        self._api.start()
        self._schedule.every(self._config.tick_interval, "tick", self._tick)
        self._schedule.every(self._config.poll_interval, "poll", self._polling.round)
        self._schedule.every(_PRUNE_SECONDS, "prune", self._prune)
        self._schedule.start()
        self._polling.round()
        self._following.start()
        for warning in self._config.warnings():
            self._log.warning(warning)
        self._log.info("listening", address=self.address, mode=self._config.policy.mode, state=self._config.state)

    def stop(self) -> None:
        """Take nothing more, feed what was taken, write the last transaction; then end the other threads."""
        self._log.info("stopping")
        self._schedule.stop()
        self._inbox.close()
        self._core_thread.join()
        self._polling.stop()
        self._following.stop()
        self._delivery.stop()
        self._api.stop()
        self._store.close()
        self.stopped = True
        self._log.info("stopped")

    def unready(self) -> str:
        """Return why the daemon is not ready, or nothing."""
        if self._live.failure is not None:
            return "the core thread ended"
        if self._live.stuck:
            return "the database cannot be written"
        if not self._caught_sight():
            return "not every source has been polled yet"
        return ""

    def _caught_sight(self) -> bool:
        return self._polling.first_round.is_set() or time.monotonic() - self._started > _FIRST_ROUND_SECONDS

    def _run_core(self) -> None:
        try:
            self._live.run()
        except Exception:
            self.broken.set()  # said in the log by the thread itself

    def _tick(self) -> None:
        # Before the first look at the sources, time that passed while this daemon was down would look like silence.
        if not self._caught_sight():
            return
        now = time.time()
        try:
            for command in self._windows.due(now):
                if not self._inbox.offer(Received(self._store.receive(command, now), command)):
                    break
                self._windows.told(command)
        except StoreError as error:
            self._log.error("a maintenance window cannot be opened", error=str(error))
        if not self._inbox.offer(Tick(now)):
            self._metrics.ticks_dropped.inc()

    def _prune(self) -> None:
        try:
            self._store.prune(time.time() - self._config.retention)
        except StoreError as error:
            self._log.error("pruning failed", error=str(error))

    def _watch(self) -> None:
        metrics = self._metrics
        metrics.watch("queue_length", "Items that wait for the core.", lambda: float(len(self._inbox)))
        metrics.watch(
            "outbox_oldest_pending_timestamp_seconds",
            "When the oldest message that is not delivered yet was made; 0 while there is none.",
            lambda: self._outbox.oldest_pending() or 0.0,
        )
        metrics.watch_by(
            "outbox_messages", "Messages by phase.", "phase", ("deliver", "follow", "done"), self._outbox.counts
        )
        metrics.watch_by("incidents", "Incidents by state.", "state", INCIDENT_STATES, self._store.counts)


def make_notifiers(config: Config) -> Mapping[str, Notifier]:
    """Return the configured destinations by name.

    Raises:
        ConfigError: the webhook's secret cannot be read.
    """
    notifiers: dict[str, Notifier] = {"log": LogNotifier()}
    if config.receiver is not None:
        notifiers["receiver"] = make_webhook(config, config.receiver)
    return notifiers


def make_webhook(config: Config, receiver: ReceiverConfig) -> WebhookNotifier:
    """Return the way to the receiver.

    Raises:
        ConfigError: the secret or the certificates cannot be read.
    """
    secret_file = config.path(receiver.secret_file)
    read_webhook_secret(secret_file)
    ca_file = None if receiver.ca_file is None else config.path(receiver.ca_file)
    if ca_file is not None and not ca_file.is_file():
        raise ConfigError([f"{ca_file}: is no file; receiver.ca_file names one with certificates"])
    return WebhookNotifier(receiver.url, secret_file, receiver.status_url, receiver.timeout, ca_file)


def no_evidence(query: Query) -> Observation:
    """Answer a query for outside evidence where no such source is configured."""
    return Observation(query.query_id, time.time(), error=f"no source of {query.kind} evidence is configured")
