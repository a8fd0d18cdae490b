"""Several real processes that train together over gloo, as torchrun would start them, for the tests of ranks.

A test gives the body of a script; every rank runs it after :data:`PREAMBLE`, with ``rank``, ``world`` and ``folder`` set and
the process group made. What a rank hands to ``say`` comes back to the test as plain data; its journal lies under ``folder``.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import textwrap
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any

import pytest

from tests.exporter.runs import lines
from tests.real import free_port, wait_until
from trainwarden.record import Step

ROOT = Path(__file__).resolve().parents[3]

#: What every script begins with. ``end()`` leaves without the interpreter's own exit, in which torch sometimes aborts.
PREAMBLE = """
import json, os, sys, time
from pathlib import Path
import torch
import torch.distributed as dist
from torch import nn
from tests.exporter.runs import Block, loss_of, make, tokens, watch

folder, rank, world = Path(sys.argv[1]), int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])

def say(**values):
    print("SAID " + json.dumps(values), flush=True)

def until(condition, seconds=30.0):
    end = time.monotonic() + seconds
    while not condition() and time.monotonic() < end:
        time.sleep(0.01)
    return bool(condition())

def end(code=0):
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)

dist.init_process_group("gloo")
"""


@dataclass(slots=True)
class Ended:
    """How one rank ended. ``said`` is what it handed to ``say``, all of it folded into one dictionary."""

    rank: int
    code: int
    output: str
    error: str
    said: dict[str, Any] = field(default_factory=dict)


class Ranks:
    """Started ranks. Leaving the ``with`` block kills those that still run."""

    def __init__(
        self,
        body: str,
        folder: Path,
        world: int = 4,
        environment: Mapping[str, str] | None = None,
        of_rank: Mapping[int, Mapping[str, str]] | None = None,
    ) -> None:
        self._folder = folder
        folder.mkdir(parents=True, exist_ok=True)
        script = folder / "script.py"
        script.write_text(PREAMBLE + textwrap.dedent(body) + "\nend()\n")
        port = str(free_port())
        self.processes: list[subprocess.Popen[bytes]] = []
        for rank in range(world):
            with self._file(rank, "out").open("wb") as out, self._file(rank, "err").open("wb") as error:
                self.processes.append(
                    subprocess.Popen(
                        [sys.executable, str(script), str(folder)],
                        cwd=ROOT,
                        env={
                            **os.environ,
                            "PYTHONPATH": str(ROOT),
                            "RANK": str(rank),
                            "LOCAL_RANK": str(rank),
                            "WORLD_SIZE": str(world),
                            "MASTER_ADDR": "127.0.0.1",
                            "MASTER_PORT": port,
                            "OMP_NUM_THREADS": "1",
                            "GLOO_SOCKET_IFNAME": "lo",
                            **(environment or {}),
                            **(of_rank or {}).get(rank, {}),
                        },
                        stdout=out,
                        stderr=error,
                    )
                )

    def __enter__(self) -> Ranks:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for process in self.processes:
            if process.poll() is None:
                process.kill()
            process.wait()

    def _file(self, rank: int, what: str) -> Path:
        return self._folder / f"rank-{rank}.{what}"

    def output(self, rank: int) -> str:
        """What a rank has printed so far."""
        return self._file(rank, "out").read_text(errors="replace")

    def said(self, rank: int) -> dict[str, Any]:
        """What a rank has handed to ``say`` so far; of a name said twice, the later value."""
        found: dict[str, Any] = {}
        for line in self.output(rank).splitlines():
            if line.startswith("SAID "):
                found.update(json.loads(line.removeprefix("SAID ")))
        return found

    def wait_said(self, rank: int, name: str, seconds: float = 60.0) -> Any:
        """Wait until a rank has said ``name``, and return what it said.

        Raises:
            AssertionError: it ended or the time ran out before; the message holds all that the ranks printed.
        """

        def look() -> bool:
            return name in self.said(rank) or self.processes[rank].poll() is not None

        wait_until(look, seconds, what=f"rank {rank} says {name}")
        assert name in self.said(rank), f"rank {rank} ended without saying {name}\n{self._all()}"
        return self.said(rank)[name]

    def kill(self, rank: int, number: int = signal.SIGKILL) -> None:
        """Send a signal to one rank."""
        self.processes[rank].send_signal(number)

    def wait(self, seconds: float = 90.0) -> list[Ended]:
        """Wait until all ranks have ended.

        Raises:
            AssertionError: they did not within ``seconds``; the message holds all that they printed.
        """
        try:
            wait_until(lambda: all(process.poll() is not None for process in self.processes), seconds, every=0.05)
        except AssertionError:
            running = [rank for rank, process in enumerate(self.processes) if process.poll() is None]
            raise AssertionError(f"ranks {running} still run after {seconds:g} s\n{self._all()}") from None
        return [
            Ended(rank, process.returncode, self.output(rank), self._error(rank), self.said(rank))
            for rank, process in enumerate(self.processes)
        ]

    def _error(self, rank: int) -> str:
        return self._file(rank, "err").read_text(errors="replace")

    def _all(self) -> str:
        return "\n".join(
            f"--- rank {rank}\n{self.output(rank)}\n{self._error(rank)}" for rank in range(len(self.processes))
        )


def run(
    body: str,
    folder: Path,
    world: int = 4,
    environment: Mapping[str, str] | None = None,
    of_rank: Mapping[int, Mapping[str, str]] | None = None,
    seconds: float = 90.0,
) -> list[Ended]:
    """Run a script on all ranks to its end and return how each ended. All must end with 0."""
    with Ranks(body, folder, world, environment, of_rank) as ranks:
        ended = ranks.wait(seconds)
        assert [each.code for each in ended] == [0] * world, ranks._all()
        return ended


def records(folder: Path, rank: int = 0, run: str = "run") -> list[Step]:
    """Return the step records of one rank, in order."""
    return [line for line in lines(folder, run, rank) if isinstance(line, Step)]


def close(found: Any, wanted: Any, within: float = 1e-5) -> bool:
    """Say whether a value of a record, grouped or not, is the wanted one to a relative ``within``."""
    if isinstance(wanted, dict):
        same = isinstance(found, dict) and found.keys() == wanted.keys()
        return same and all(close(found[name], wanted[name], within) for name in wanted)
    return bool(found == wanted if None in (found, wanted) else found == pytest.approx(wanted, rel=within, abs=1e-9))
