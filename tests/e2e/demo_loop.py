"""The demo's treated run with its daemon, receiver and supervisor, for tests that kill parts of it.

The training is the demo's own at a smaller scale. What is waited for is read from the run's journals; processes are told
apart by their command lines in /proc.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tests.real import wait_until
from trainwarden.demo import arms
from trainwarden.demo.follow import Daemon, Journals, is_up
from trainwarden.demo.layout import Layout, prepare
from trainwarden.demo.main import lay_out
from trainwarden.demo.processes import Process, start
from trainwarden.demo.scale import SMALL
from trainwarden.record import Event, Step

#: Two shared cores, eight processes: nothing here may depend on speed.
PATIENCE = 240.0
SEED = 2


class DemoLoop:
    """One run. Parts are started, killed and started again by the test; all are ended with the context."""

    def __init__(self, folder: Path) -> None:
        self.layout: Layout = prepare(folder)
        self.answer = lay_out(self.layout, SEED, SMALL)
        self.addresses = arms.configure(self.layout)
        self.run = self.layout.run_folder("treated")
        self.processes: list[Process] = []
        self.events: list[tuple[int, Event]] = []
        self.steps: dict[int, list[int]] = {}
        self._journals = Journals(self.run)

    def start_daemon(self) -> Process:
        """Start the daemon and wait until its API is ready."""
        daemon = self._start("daemon", arms.daemon_command(self.layout))
        wait_until(lambda: is_up(self.addresses.daemon), PATIENCE, what="the daemon is ready")
        return daemon

    def start_receiver(self) -> Process:
        """Start the receiver and wait until it is ready."""
        receiver = self._start("receiver", arms.receiver_command(self.layout))
        wait_until(lambda: is_up(self.addresses.receiver), PATIENCE, what="the receiver is ready")
        return receiver

    def start_supervisor(self) -> Process:
        """Start the supervised training."""
        return self._start("train", arms.supervise_command(self.layout, SEED, SMALL))

    def start(self, name: str, command: list[str]) -> Process:
        """Start anything else that ends with the context."""
        return self._start(name, command)

    def _start(self, name: str, command: list[str]) -> Process:
        return start(self.processes, name, command, self.layout.ops / f"{name}.log")

    def look(self) -> None:
        """Read what is new in the journals."""
        for attempt, line in self._journals.new():
            if isinstance(line, Step):
                self.steps.setdefault(attempt, []).append(line.step)
            else:
                self.events.append((attempt, line))

    def step(self, attempt: int) -> int:
        """Return the newest step of an attempt, 0 before its first."""
        self.look()
        return self.steps.get(attempt, [0])[-1]

    def attempts(self) -> list[int]:
        """Return the attempts that made at least one step."""
        self.look()
        return sorted(self.steps)

    def wait_for_step(self, attempt: int, step: int) -> None:
        """Wait until an attempt has come to a step."""
        wait_until(lambda: self.step(attempt) >= step, PATIENCE, what=f"attempt {attempt} comes to step {step}")

    def of_kind(self, kind: str, attempt: int | None = None) -> list[Event]:
        """Return the events of a kind, of one attempt or of all."""
        self.look()
        return [event for number, event in self.events if event.kind == kind and attempt in (None, number)]

    def written(self, attempt: int) -> list[Event]:
        """Return an attempt's reports of complete checkpoints, without its words about deleted ones."""
        return [event for event in self.of_kind("checkpoint", attempt) if event.fields.get("complete")]

    def incidents(self, daemon: str | None = None) -> list[dict[str, Any]]:
        """Return a daemon's incidents."""
        return Daemon(daemon or self.addresses.daemon).incidents() or []

    def wait_until_recovered(self, daemon: str | None = None) -> dict[str, Any]:
        """Wait for the one incident to be closed and return it."""

        def closed() -> list[dict[str, Any]]:
            found = self.incidents(daemon)
            return [row for row in found if row["state"] in ("recovered", "not_recovered", "inconclusive", "escalated")]

        incident: dict[str, Any] = wait_until(
            closed, PATIENCE, what=f"an incident is closed: {self.incidents(daemon)}"
        )[0]
        return incident

    def trainers(self) -> list[int]:
        """Return the process ids of the training processes of this run that are alive now."""
        found = []
        for folder in Path("/proc").iterdir():
            if folder.name.isdigit():
                with contextlib.suppress(OSError):
                    words = (folder / "cmdline").read_bytes().split(b"\0")
                    mine = words[1:3] == [b"-m", b"trainwarden.demo.train"] and os.fsencode(self.layout.data) in words
                    if mine and (folder / "stat").read_text().rpartition(")")[2].split()[0] != "Z":
                        found.append(int(folder.name))
        return found

    def rollbacks(self) -> int:
        """Count the executed plans of the run."""
        ledger = self.run.ledger()
        return len(ledger.entries) if ledger else 0

    def end(self) -> None:
        """End all processes, the supervisor before the trainer could be left behind."""
        for process in reversed(self.processes):
            process.end()
        for pid in self.trainers():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)


@contextlib.contextmanager
def demo_loop(folder: Path) -> Iterator[DemoLoop]:
    """Yield a loop whose processes are ended at the end; on a failure the ends of their logs are printed."""
    loop = DemoLoop(folder)
    try:
        yield loop
    except BaseException:
        for incident in loop.incidents():
            print(f"--- incident {json.dumps(incident)}")
        for log in sorted(loop.layout.ops.glob("*.log")):
            print(f"--- {log.name}\n" + "\n".join(log.read_text(errors="replace").splitlines()[-40:]))
        raise
    finally:
        loop.end()
