"""Lays out a run of a kind, starts its processes and waits for them; what is left are its records and its held-out loss."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from numpy.random import Generator

from .fault import SCALE, Fault, chance_of
from .job import Job
from .kinds import KINDS
from .texts import write

BENCH = Path(__file__).parent.parent
#: Seconds that one process of a run may take, and without a new record after which a run that hangs is ended.
PATIENCE, SILENCE = 300.0, 45.0


class RunError(RuntimeError):
    """A run did not come to its end. The message holds the end of its log."""


@dataclass(frozen=True, slots=True)
class Ended:
    """How a run ended: its held-out loss (NaN where it is none, None where it hung), and the seconds that it took."""

    loss: float | None
    hung: bool
    seconds: float


def lay_out(kind: str, seed: int, folder: Path, steps: int = SCALE.steps) -> Job:
    """Empty a run's folder, draw the fault's place and size, and write its text and its job."""
    shutil.rmtree(folder, ignore_errors=True)
    fault, chance = drawn(kind, seed)
    first, last = write(folder, seed, fault, replace(fault.scale(SCALE), steps=steps), chance)
    values = {"first": first, "last": last, **fault.values}
    stop_at = int(values["first"]) - 1 if fault.resumes else None
    job = Job(kind=kind, seed=seed, folder=str(folder.absolute()), values=values, steps=steps, stop_at=stop_at)
    job.write()
    return job


def drawn(kind: str, seed: int) -> tuple[Fault, Generator]:
    """Return a kind's fault as the seed has it, and the generator that what follows is drawn from."""
    chance = chance_of(seed, kind)
    return KINDS[kind](KINDS[kind].draw(chance)), chance


def environment() -> dict[str, str]:
    """Return what training programs are started with: this folder to import from, one thread."""
    inherited = {name: value for name, value in os.environ.items() if not name.startswith("TRAINWARDEN_")}
    path = os.pathsep.join(filter(None, (str(BENCH), inherited.get("PYTHONPATH"))))
    return {**inherited, "PYTHONPATH": path, "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"}


def command(job: Job) -> list[str]:
    """Return the command line of one process of the run."""
    return [sys.executable, "-m", "faulty.train", str(job.file)]


def run(job: Job) -> Ended:
    """Train: once, or twice where the kind is stopped and resumed, or until it was silent for long.

    Raises:
        RunError: a process ended otherwise than it should, or not at all.
    """
    kind = KINDS[job.kind]
    begun = time.monotonic()
    hung = False
    for launch in range(2 if kind.resumes else 1):
        hung = _launch(job, kind, launch)
    return Ended(None if hung else _loss(job), hung, time.monotonic() - begun)


def _launch(job: Job, kind: type[Fault], launch: int) -> bool:
    """Start all ranks and wait; say whether they hung."""
    ranks: list[subprocess.Popen[bytes]] = []
    log = job.root / "train.log"
    try:
        with log.open("ab") as output:
            for rank in range(kind.world_size):
                more = {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(kind.world_size)}
                own = {**environment(), "MEETING": str(launch), **(more if kind.world_size > 1 else {})}
                popen = subprocess.Popen(command(job), stdin=subprocess.DEVNULL, stdout=output, stderr=output, env=own)
                ranks.append(popen)
        return _wait(job, kind, ranks)
    finally:
        for one in ranks:
            if one.poll() is None:
                one.kill()
            one.wait()


def _wait(job: Job, kind: type[Fault], ranks: list[subprocess.Popen[bytes]]) -> bool:
    end = time.monotonic() + PATIENCE
    hung = False
    while any(one.poll() is None for one in ranks):
        if time.monotonic() > end:
            raise RunError(f"{job.kind} did not end in {PATIENCE:.0f} s; its log is {job.root / 'train.log'}")
        if kind.hangs and not hung and _silent(job):
            hung = True
            for one in ranks:
                one.send_signal(signal.SIGTERM)
        time.sleep(0.1)
    for one in ranks:
        if one.returncode not in ((0, 143) if hung else (0,)):
            tail = (job.root / "train.log").read_text(errors="replace").splitlines()[-25:]
            raise RunError(f"{job.kind} ended with exit code {one.returncode}:\n" + "\n".join(tail))
    return hung


def _silent(job: Job) -> bool:
    written = [path.stat().st_mtime for path in job.root.glob("runs/*/attempt-*/*/rank-0/*.ndjson")]
    return bool(written) and time.time() - max(written) > SILENCE


def _loss(job: Job) -> float:
    try:
        found: dict[str, Any] = json.loads((job.root / "heldout.json").read_text())
    except FileNotFoundError:
        raise RunError(f"{job.kind} left no held-out loss in {job.root}") from None
    return float(found["loss"])
