"""Processes of the demo: started with a log of their own, watched, and ended when the demo ends, however it ends."""

from __future__ import annotations

import contextlib
import os
import shlex
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from .layout import DemoError, shown

_PATIENCE = 15.0  # seconds from SIGTERM to SIGKILL


@dataclass(slots=True)
class Process:
    """A running program. Its output goes to ``log``."""

    name: str
    command: Sequence[str]
    popen: subprocess.Popen[bytes]
    log: Path

    def done(self) -> bool:
        """Say whether it ended well.

        Raises:
            DemoError: it ended otherwise; with the end of its log.
        """
        code = self.popen.poll()
        if code is None:
            return False
        if code != 0:
            raise DemoError(f"{self.name} ended with exit code {code}; the end of {self.log}:\n{self._tail()}")
        return True

    def must_run(self) -> None:
        """Check a process that has no reason to end.

        Raises:
            DemoError: it ended.
        """
        code = self.popen.poll()
        if code is not None:
            raise DemoError(f"{self.name} ended early with exit code {code}; the end of {self.log}:\n{self._tail()}")

    def end(self) -> None:
        """Ask it to end, and end it if it does not."""
        if self.popen.poll() is None:
            self.popen.send_signal(signal.SIGTERM)
            try:
                self.popen.wait(_PATIENCE)
            except subprocess.TimeoutExpired:
                self.popen.kill()
                self.popen.wait()

    def _tail(self) -> str:
        lines = self.log.read_text(errors="replace").splitlines()[-15:]
        return "\n".join(f"    {line}" for line in lines) or "    (empty)"


def start(
    among: list[Process], name: str, command: Sequence[str], log: Path, environment: dict[str, str] | None = None
) -> Process:
    """Start a program with ``environment`` added to this process' own, and add it to ``among``; it appends to ``log``.

    What the caller's shell has set for trainwarden is left out: it would outweigh the configuration files.
    """
    inherited = {name: value for name, value in os.environ.items() if not name.startswith("TRAINWARDEN_")}
    with log.open("ab") as output, _undisturbed():
        popen = subprocess.Popen(
            list(command),
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            env={**inherited, "PYTHONUNBUFFERED": "1", **(environment or {})},
        )
        process = Process(name, list(command), popen, log)
        among.append(process)
    return process


@contextlib.contextmanager
def _undisturbed() -> Iterator[None]:
    """Put off Ctrl-C and SIGTERM: a program that is being started must be known of before the demo is ended."""
    if threading.current_thread() is not threading.main_thread():  # nobody interrupts another thread
        yield
        return
    held: list[int] = []
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    before = {number: handler for number, handler in before.items() if callable(handler)}
    for number in before:
        signal.signal(number, lambda number, frame: held.append(number))
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    if held:
        raise KeyboardInterrupt


@contextlib.contextmanager
def ending(processes: list[Process]) -> Iterator[list[Process]]:
    """End all processes of the list at the end of the block, the newest first."""
    try:
        yield processes
    finally:
        for process in reversed(processes):
            process.end()


def trainwarden() -> list[str]:
    """Return the command that runs this very installation's command line."""
    script = Path(sys.executable).with_name("trainwarden")
    return [str(script)] if script.is_file() else [sys.executable, "-m", "trainwarden.rules.cli"]


def typed(*arguments: str) -> str:
    """Return a command line of this installation as one would type it in this shell, which may not have it on its PATH."""
    command = trainwarden()
    if len(command) == 1:
        found = shutil.which("trainwarden")
        same = found is not None and Path(found).resolve() == Path(command[0]).resolve()
        command = ["trainwarden"] if same else [shown(Path(command[0]))]
    return shlex.join([*command, *arguments])
