"""Real supervised trainers for tests: toy training scripts, a supervisor in a process of its own, what /proc says of them."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

from tests.real import wait_until
from trainwarden.receiver import control, processes
from trainwarden.receiver.state import State, read_state
from trainwarden.runfolder import RunFolder

SUPERVISE = """
import sys
from pathlib import Path
from trainwarden.receiver import restarts
from trainwarden.receiver.supervise import supervise
restarts.FIRST_PAUSE = 0.1
base, run, grace, limit, *command = sys.argv[1:]
sys.exit(supervise(command, run=run, base=Path(base), grace=float(grace), max_restarts=int(limit)))
"""

#: Says that it is ready and trains for ever.
TOY = "say('ready', attempt)\nwhile True: time.sleep(0.05)\n"

#: Every toy begins so: it says in LOG who runs, and shouts if another trainer of the run is alive.
PRELUDE = """
import fcntl, os, signal, subprocess, sys, time
attempt = int(os.environ["TRAINWARDEN_ATTEMPT"])
log = open(os.environ["LOG"], "a", buffering=1)
twin = open(os.environ["LOG"] + ".twin", "w")
try:
    fcntl.flock(twin, fcntl.LOCK_EX | fcntl.LOCK_NB)
except BlockingIOError:
    log.write("TWIN\\n")
def say(*words):
    log.write(" ".join(map(str, words)) + "\\n")
say("start", attempt, os.getpid())
"""


class Supervised:
    """One run folder, its toy trainer and the supervisors that were started for it."""

    def __init__(self, base: Path, run: str = "toy") -> None:
        self.run = RunFolder(run, base)
        self.log = base / "log"
        self.toy = base / "toy.py"
        self.started: list[subprocess.Popen[str]] = []

    def write_toy(self, body: str) -> None:
        """Write the training script: the prelude and ``body``."""
        self.toy.parent.mkdir(parents=True, exist_ok=True)
        self.toy.write_text(PRELUDE + textwrap.dedent(body))

    def start(
        self, *command: str, grace: float = 1.0, max_restarts: int = 0, **environment: str
    ) -> subprocess.Popen[str]:
        """Start a supervisor for ``command`` (default: the toy)."""
        command = command or (sys.executable, str(self.toy))
        arguments = [str(self.run.path.parent), self.run.run, str(grace), str(max_restarts), *command]
        with (self.run.path.parent / "stderr").open("a") as stderr:
            process = subprocess.Popen(
                [sys.executable, "-c", SUPERVISE, *arguments],
                env=os.environ | {"LOG": str(self.log)} | environment,
                stderr=stderr,
                text=True,
            )
        self.started.append(process)
        return process

    def lines(self) -> list[str]:
        """What the toys have logged."""
        return self.log.read_text().splitlines() if self.log.exists() else []

    def said(self) -> str:
        """What the supervisors have said."""
        return (self.run.path.parent / "stderr").read_text()

    def wait_for(self, line: str, seconds: float = 15.0) -> None:
        """Wait until a toy has logged a line that begins so."""
        try:
            wait_until(lambda: any(entry.startswith(line) for entry in self.lines()), seconds)
        except AssertionError:
            raise AssertionError(f"no {line!r} in the toy's log {self.lines()}; {self.said()}") from None

    def state(self) -> State:
        """The supervisor's state file."""
        state = read_state(self.run)
        assert state is not None
        return state

    def ask(self, op: Any, **fields: Any) -> control.Answer:
        """Send one command to the supervisor."""
        return control.ask(self.run.path, control.Command(op=op, **fields))

    def phase(self) -> str:
        """Phase that the supervisor reports, "" if none answers."""
        try:
            return self.ask("look").live.phase
        except OSError:
            return ""

    def tree(self) -> set[int]:
        """Ids of the living processes that know this test's log: trainers, their children, not the supervisors."""
        table = processes.snapshot()
        found = processes.marked(table, f"LOG={self.log}")
        alive = {process.pid for process in processes.living(table, found)}
        keepers = {pid for pid in alive if b"receiver.keeper" in _command_line(pid)}
        return alive - keepers - {process.pid for process in self.started}

    def everybody(self) -> set[int]:
        """The tree and keepers, without the supervisors."""
        table = processes.snapshot()
        found = processes.marked(table, f"LOG={self.log}")
        return {process.pid for process in processes.living(table, found)} - {p.pid for p in self.started}

    def end(self) -> None:
        """Kill whatever is left; for the end of a test."""
        for process in self.started:
            if process.poll() is None:
                process.kill()
            process.wait()
        for pid in self.everybody():
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                continue


def _command_line(pid: int) -> bytes:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return b""
