"""The thread that asks a rank's GPU how it is, every few seconds, and waits for its XIDs in between.

A call of NVML may fail or never come back. So this thread makes all of them, and nobody waits for it: what it has seen lies ready for
the drain thread under a lock that is never held while NVML is asked. It is a daemon, and closing the exporter only tells it to end.
"""

from __future__ import annotations

import importlib
import math
import socket
import threading
import time
from collections.abc import Callable, Iterable
from typing import Any

import torch

from trainwarden.exporter.notices import Notices
from trainwarden.record import Value

from .quantities import Counts, Quantities, by_reason
from .used import Card, Used, find_card, text, used_by
from .xid import lookup

#: Longest time that XIDs are waited for in one call: so long does the thread live on after it was told to end.
WAIT_SECONDS = 1.0
#: A reading that is so many periods old is no longer told; an XID that came again within so many seconds is counted, not told.
OLD_PERIODS, QUIET_SECONDS = 3.0, 60.0
#: Signals that a record has where something happened, not at each reading.
XIDS, FAULTS = "gpu_xid_errors", "gpu_faults"


class Hardware(threading.Thread):
    """One per exporter, begun once it is known which GPU the rank uses, and never where it uses none. ``seconds`` 0 turns it off.

    ``measured`` is given signals as they are read, counters as increments; ``happened`` the fields of an event.
    """

    def __init__(self, seconds: float, notices: Notices) -> None:
        super().__init__(name="trainwarden-hardware", daemon=True)
        self._seconds = seconds
        self._notices = notices
        self._used: Used | None = None
        self._over = threading.Event()
        self._lock = threading.Lock()
        self._read_at = -math.inf
        self._gauges: dict[str, Value] = {}
        self._grown: dict[str, float] = {}
        self._fresh = False
        self._told: dict[int, float] = {}
        self.measured: Callable[[dict[str, Value]], None] = lambda signals: None
        self.happened: Callable[[dict[str, Any]], None] = lambda fields: None
        #: Readings that were made, and the seconds that the newest took.
        self.readings, self.cost = 0, 0.0

    # The training thread.

    def look(self, parameters: Iterable[torch.Tensor]) -> None:
        """Find out which GPU the parameters lie on, unless that is known."""
        if self._seconds > 0 and self._used is None:
            self._used = used_by(parameters)

    # The drain thread.

    def begin(self) -> None:
        """Start where a GPU is known and it has not started yet."""
        if self._used is not None and self.ident is None and not self._over.is_set():
            self.start()

    def take(self) -> dict[str, Value]:
        """Return what is new since the last time: the newest reading unless it is too old, and what counters rose by."""
        with self._lock:
            found: dict[str, Value] = dict(self._gauges) if self._fresh and self._young() else {}
            found.update(self._grown)
            self._fresh = False
            self._grown = {}
        return found

    def newest(self) -> dict[str, Value]:
        """Return the newest reading, whether it was taken before or not; nothing where it is too old."""
        with self._lock:
            return dict(self._gauges) if self._young() else {}

    def end(self) -> None:
        """Have it end by itself, once NVML has answered. Waits for nothing."""
        self._over.set()

    def _young(self) -> bool:
        return time.monotonic() - self._read_at <= OLD_PERIODS * self._seconds

    # The thread's own.

    def run(self) -> None:
        """Find the device, then read it until the end, or until it is gone."""
        try:
            self._run()
        except Exception as error:
            self._notices.fault("hardware", error)
        finally:
            self._over.set()

    def _run(self) -> None:
        try:
            nvml = importlib.import_module("pynvml")
        except ImportError:
            self._notices.say(
                "hardware",
                "the GPU's temperature, clocks, memory errors and XIDs are not seen: pip install nvidia-ml-py, or "
                "hardware_seconds=0 to do without",
            )
            return
        try:
            nvml.nvmlInit()
        except nvml.NVMLError as error:
            self._notices.say(
                "hardware",
                f"the GPU's health is not seen: NVML says {_says(error)}; in a container, let it have the driver capability "
                "'utility'",
            )
            return
        try:
            self._watch(nvml)
        finally:
            try:
                nvml.nvmlShutdown()
            except nvml.NVMLError:  # of a device that is gone
                pass

    def _watch(self, nvml: Any) -> None:
        assert self._used is not None
        card = find_card(nvml, self._used)
        if card is None:
            sentence = (
                f"the GPU's health is not seen: NVML knows no device {self._used.uuid or self._used.bus or '(unnamed)'}"
            )
            self._notices.say("hardware", sentence)
            return
        asked, counts = Quantities(nvml, card.handle), Counts()
        events = _events(nvml, card)
        if events is not None:
            self._publish({}, {XIDS: 0.0, FAULTS: 0.0})
        try:
            self._introduce(nvml, card)
            while not self._over.is_set():
                began = time.perf_counter()
                found = asked.read()
                for name, error in asked.garbled.items():
                    self._notices.say(
                        f"gpu {name}", f"the GPU's {name} cannot be read: {type(error).__name__}: {error}"
                    )
                self._publish(by_reason(found), counts.increments(found), read=True)
                self.readings, self.cost = self.readings + 1, time.perf_counter() - began
                # At whole multiples of the period by the clock: the ranks of a run read at about the same time.
                until = time.monotonic() + self._seconds - time.time() % self._seconds
                events = self._wait(nvml, card, asked, events, until)
        except nvml.NVMLError as error:
            if not asked.lost(error):
                raise
            self._lose(card, error)

    def _introduce(self, nvml: Any, card: Card) -> None:
        """Tell which device it is."""
        fields: dict[str, Any] = {"what": "device", "uuid": card.uuid, "host": socket.gethostname()}
        asks = {"name": lambda: nvml.nvmlDeviceGetName(card.handle), "driver": nvml.nvmlSystemGetDriverVersion}
        for name, ask in asks.items():
            try:
                fields[name] = text(ask())
            except nvml.NVMLError:
                pass
            except Exception as error:
                self._notices.say(f"gpu {name}", f"the GPU's {name} cannot be read: {type(error).__name__}: {error}")
        if card.instance is not None:
            fields["gpu_instance"] = card.instance
        self.happened(fields)

    def _wait(self, nvml: Any, card: Card, asked: Quantities, events: Any, until: float) -> Any:
        """Wait until the next reading is due, for XIDs where the device tells of them. Returns the events to wait for from now on."""
        while not self._over.is_set() and (left := until - time.monotonic()) > 0:
            if events is None:
                self._over.wait(left)
                continue
            began, wait = time.monotonic(), min(left, WAIT_SECONDS)
            try:
                event = nvml.nvmlEventSetWait_v2(events, max(1, int(1000 * wait)))
                xid = event.eventType == nvml.nvmlEventTypeXidCriticalError and _concerns(card, event)
                code = int(event.eventData)
            except nvml.NVMLError as error:
                if asked.lost(error):
                    raise
                if error.value != nvml.NVML_ERROR_TIMEOUT:
                    events = None
                elif (
                    time.monotonic() - began < wait / 2
                ):  # it has not waited: nor may this become a loop without a pause
                    self._over.wait(wait / 2)
                continue
            except Exception as error:
                self._notices.say("gpu XIDs", f"the GPU's XIDs are no longer seen: {type(error).__name__}: {error}")
                events = None
                continue
            if xid:
                self._xid(card, code)
        return events

    def _xid(self, card: Card, code: int) -> None:
        known, now = lookup(code), time.monotonic()
        grown = {XIDS: 1.0}
        if known.fault:
            grown[FAULTS] = 1.0
        self._publish({}, grown)
        if now - self._told.get(code, -math.inf) < QUIET_SECONDS:
            return
        self._told[code] = now
        fields = {"what": "xid", "code": code, "meaning": known.meaning, "points_to": known.points_to}
        self.happened({**fields, "fault": known.fault, "uuid": card.uuid, "host": socket.gethostname()})

    def _lose(self, card: Card, error: Any) -> None:
        """The device is gone: nothing of what it said last is true any more."""
        with self._lock:
            gone: dict[str, Value] = {
                name: dict.fromkeys(value, math.nan) if isinstance(value, dict) else math.nan
                for name, value in self._gauges.items()
            }
            self._gauges, self._fresh = {}, False
        self.measured(gone)
        self._publish({}, {FAULTS: 1.0})
        fields = {"what": "lost", "meaning": f"NVML no longer reaches the GPU: {_says(error)}", "points_to": "device"}
        self.happened({**fields, "fault": True, "uuid": card.uuid, "host": socket.gethostname()})

    def _publish(self, gauges: dict[str, Value], grown: dict[str, float], read: bool = False) -> None:
        with self._lock:
            if read:
                self._gauges, self._fresh, self._read_at = gauges, True, time.monotonic()
            for name, number in grown.items():
                self._grown[name] = self._grown.get(name, 0.0) + number
        self.measured({**gauges, **grown})


def _events(nvml: Any, card: Card) -> Any:
    """Return a set of events that holds the device's XIDs, None where it tells none."""
    try:
        if not nvml.nvmlDeviceGetSupportedEventTypes(card.handle) & nvml.nvmlEventTypeXidCriticalError:
            return None
        events = nvml.nvmlEventSetCreate()
        nvml.nvmlDeviceRegisterEvents(card.handle, nvml.nvmlEventTypeXidCriticalError, events)
    except nvml.NVMLError:
        return None
    return events


def _concerns(card: Card, event: Any) -> bool:
    """Say whether an event is about the rank's part of the device; one about no part in particular (all bits set) is."""
    return card.instance is None or event.gpuInstanceId in (card.instance, 0xFFFFFFFF)


def _says(error: Any) -> str:
    return str(error).rstrip(".") or type(error).__name__
