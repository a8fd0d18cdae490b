"""The whole loop around a training script of a test's own: real receiver, daemon and supervisor, each a process, over loopback."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.real import free_port, wait_until
from trainwarden.demo.follow import Daemon, is_up
from trainwarden.demo.processes import Process, start, trainwarden
from trainwarden.receiver.secretfile import write_new_secret
from trainwarden.runfolder import RunFolder

#: Two shared cores: nothing here may depend on speed.
PATIENCE = 240.0


@dataclass
class SmallLoop:
    """Where it runs, and what was started. ``runs`` is the folder of the runs, ``folder`` that of the one run."""

    place: Path
    runs: Path
    folder: RunFolder
    address: str
    processes: list[Process] = field(default_factory=list)

    def begin(self, name: str, command: Sequence[str]) -> Process:
        """Start a command of trainwarden's; what it prints goes to ``<name>.log``."""
        environment = {"TRAINWARDEN_DIR": str(self.runs), "OMP_NUM_THREADS": "1"}
        return start(self.processes, name, [*trainwarden(), *command], self.place / f"{name}.log", environment)

    def train(self, command: Sequence[str]) -> Process:
        """Start the training under a supervisor."""
        return self.begin("train", ["supervise", "--run", self.folder.run, "--dir", str(self.runs), "--", *command])

    def incidents(self) -> list[dict[str, Any]]:
        """What the daemon tells."""
        return Daemon(self.address).incidents() or []


@contextmanager
def small_loop(place: Path, run: str, config: str, checkpoints: Path) -> Iterator[SmallLoop]:
    """Start receiver and daemon; end everything with the block, and print the ends of their logs where it fails.

    ``config`` is the daemon's file with ``{daemon}``, ``{receiver}``, ``{runs}`` and ``{secret}`` in it.
    """
    runs = place / ".trainwarden"
    runs.mkdir()
    checkpoints.mkdir()
    write_new_secret(place / "secret")
    daemon, receiver = f"127.0.0.1:{free_port()}", f"127.0.0.1:{free_port()}"
    (place / "trainwarden.yml").write_text(
        config.format(daemon=daemon, runs=runs, receiver=receiver, secret=place / "secret")
    )
    loop = SmallLoop(place, runs, RunFolder(run, runs), daemon)
    try:
        receiving = ["receiver", "--secret-file", str(place / "secret"), "--root", str(runs), "--listen", receiver]
        loop.begin("receiver", [*receiving, "--checkpoints", str(checkpoints), "--db", str(place / "receiver.db")])
        loop.begin("daemon", ["run", "--config", str(place / "trainwarden.yml")])
        wait_until(lambda: is_up(daemon) and is_up(receiver), PATIENCE, what="daemon and receiver are up")
        yield loop
    except BaseException:
        for name in ("receiver", "daemon", "train"):
            log = place / f"{name}.log"
            print(f"--- {name}\n" + "\n".join(log.read_text().splitlines()[-40:] if log.exists() else []))
        for row in loop.incidents() if is_up(daemon) else []:
            said = (line["says"] for line in row["timeline"])
            print(row["action"], row["held_by"], row["cause"], *said, sep="\n    ")
        raise
    finally:
        for process in reversed(loop.processes):
            process.end()
