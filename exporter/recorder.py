"""From arrived values to records: numbers the lines, lets each probe say what it saw, and hands the line to the sinks.

Runs on the drain thread alone. What fails here costs a signal or a sink, never the record.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec

from trainwarden.record import Event, Step, Value, encode_line

from .across import Joined
from .cadence import Cadence
from .notices import Notices, log
from .preflight import Finding, Preflight, as_event
from .probes.probe import Probe, Shares, Totals
from .series import Page
from .sheet import Reading
from .sinks.journal import Journal, totals_at
from .sinks.ring import Ring


@dataclass(slots=True)
class Seen:
    """What this rank saw of a step: its signals, and its shares of sums over all ranks by probe, name and group.

    ``whole``: it was not known then that ranks hold parts of what is measured. ``compared``: what the ranks compare beside.
    """

    whole: bool = True
    signals: dict[str, Value] = field(default_factory=dict)
    shares: dict[str, Shares] = field(default_factory=dict)
    compared: dict[str, Value] = field(default_factory=dict)


class Recorder:
    """Makes the lines of one (start, rank)."""

    def __init__(
        self,
        probes: Sequence[Probe],
        cadence: Cadence,
        ring: Ring,
        journal: Journal | None,
        page: Page,
        notices: Notices,
        preflight: Preflight | None = None,
        split: Callable[[], bool] = lambda: False,
    ) -> None:
        self._split = split
        self._probes = list(probes)
        self._cadence = cadence
        self._ring = ring
        self._journal = journal
        self._page = page
        self._notices = notices
        self._preflight = preflight
        self._seq = 0
        self._samples = 0.0
        self._tokens = 0.0
        #: The start event as it was written, for ``/api/v1/run``.
        self.start_line: bytes | None = None

    def join(self, probe: Probe) -> None:
        """Let one more probe say what it saw, behind the others. From any thread."""
        self._probes.append(probe)

    def begin(self, step: int, files: Callable[[], list[Path]]) -> None:
        """Go on counting samples and tokens where the record of ``step`` left off; ``files`` lists journals, newest first."""
        if step > 0:
            self._samples, self._tokens = totals_at(files(), step) or (0.0, 0.0)

    def event(self, event: Event) -> None:
        """Record an event."""
        event.seq = self._seq + 1
        try:
            line = encode_line(event)
        except TypeError:  # a field of the user's that JSON has no form for
            event.fields = {name: _shown(value) for name, value in event.fields.items()}
            line = encode_line(event)
        if event.kind == "start":
            self.start_line = line
        self._write(line)
        self._page.event(event)
        if self._preflight is not None:
            if event.kind == "start":
                self._tell(self._preflight.begin, event, event.time)
            self._preflight.event(event)

    def read(self, reading: Reading) -> Seen:
        """Let each probe say what it saw in an arrived step. Steps come in order."""
        seen = Seen(whole=not self._split())
        signals, host = seen.signals, reading.host
        self._samples += host.get("samples", 0)
        self._tokens += host.get("tokens", 0)
        for probe in list(self._probes):
            try:
                signals.update(probe.signals(reading))
                seen.compared.update(probe.compared(reading))
                shares = probe.shares(reading) if probe.summed else None
                if shares is not None:
                    seen.shares[probe.name] = shares
            except Exception as error:
                self._notices.fault(f"probe {probe.name}", error)
        if "samples" in host:
            signals["samples_seen"] = self._samples
        if "tokens" in host:
            signals["tokens"] = self._tokens
        if seen.whole:  # what looks odd to this rank, before it has waited for the others
            self._cadence.look(Step(seq=0, step=reading.step, time=0.0, signals=signals))
        return seen

    def step(
        self, reading: Reading, time: float, phase: str, seen: Seen | None = None, joined: Joined | None = None
    ) -> Step:
        """Record a step and return its record. ``seen`` is what :meth:`read` gave, ``joined`` the numbers over all ranks."""
        seen = self.read(reading) if seen is None else seen
        signals, host = seen.signals, reading.host
        if joined is not None and "loss" in joined.ranks:
            loss, expected = joined.ranks["loss"], joined.ranks.get("loss_expected")
            signals["loss"] = loss.sum / loss.n
            # A mean of other ranks' losses than those of which one is expected would be another number.
            signals.pop("loss_expected", None)
            if expected is not None and expected.n == loss.n:
                signals["loss_expected"] = expected.sum / expected.n
        if self._split():
            self._complete(reading, seen, {} if joined is None else joined.totals)
        for kind, fields in host.get("events", ()):  # what a probe has to tell beside numbers
            self.event(Event(kind=kind, time=time, step=reading.step, fields=fields))
        step = Step(
            seq=self._seq + 1,
            step=reading.step,
            time=time,
            signals=signals,
            samples=host.get("ranges", []),
            shards=host.get("shards", []),
            ranks={} if joined is None else joined.ranks,
            phase=phase,
        )
        self._write(encode_line(step))
        self._page.step(step)
        if not seen.whole:
            self._cadence.look(step)
        if self._preflight is not None:
            self._tell(self._preflight.record, step, time)
        return step

    def _complete(self, reading: Reading, seen: Seen, totals: Mapping[str, Totals]) -> None:
        """Put what sums over the elements of all ranks make beside this rank's own, and leave no part under the whole's name."""
        for probe in list(self._probes):
            try:
                if probe.name in totals:
                    seen.signals.update(probe.joined(reading, totals[probe.name]))
                elif seen.whole:
                    for name in probe.whole:
                        seen.signals.pop(name, None)
            except Exception as error:
                self._notices.fault(f"probe {probe.name}", error)

    def _tell(self, look: Callable[[Any], list[Finding]], what: Any, time: float) -> None:
        """Say what is wrong with the settings, in the log and as events."""
        try:
            for finding in look(what):
                log.warning("trainwarden: preflight: %s", finding.says)
                self.event(as_event(finding, time))
        except Exception as error:
            self._notices.fault("preflight", error)

    def _write(self, line: bytes) -> None:
        self._seq += 1
        self._ring.append(self._seq, line)
        if self._journal is not None:
            self._journal.append(line)

    def flush(self) -> None:
        """Hand to the disk what it has not taken yet."""
        if self._journal is not None:
            self._journal.flush()

    def close(self) -> None:
        """Write what waits and close the journal."""
        if self._journal is not None:
            self._journal.close()


def _shown(value: Any) -> Any:
    """Return a value as JSON can have it: what is not plain data becomes its text."""
    try:
        return msgspec.to_builtins(value)
    except TypeError:
        return str(value)
