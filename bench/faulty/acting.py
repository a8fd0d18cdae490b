"""A run under those that act: supervisor, daemon and receiver, each a process, over HTTP, as a user runs them.

None of them is told what was planted. A person stands by: where the judgement asks for an approval the plan that it shows is
approved, and that is said.
"""

from __future__ import annotations

import base64
import glob
import json
import os
import secrets
import socket
import subprocess
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from trainwarden.demo.follow import Daemon, is_up
from trainwarden.demo.processes import Process, ending, start, trainwarden
from trainwarden.runfolder import RunFolder

from .job import Job
from .judge import POLICY
from .runs import BENCH, RunError, command

#: Seconds for daemon and receiver to answer, for the whole run, and for the daemon to close what is open once the run has ended.
UP, WHOLE, AFTER = 60.0, 240.0, 10.0
#: Seconds that a step takes at least: a daemon that is asked to act must see the run while it lasts.
PACE = 0.03

CONFIG = """\
listen: {daemon}
state: trainwarden.db
poll_interval: 300ms
tick_interval: 500ms
sources:
  - folder: {targets}
policy: {policy}
receiver: {{url: {webhook}, status_url: {requests}, secret_file: {secret}}}
act_token_file: {token}
"""
RECEIVER = """\
listen: {receiver}
secret_file: {secret}
db: {db}
roots: [{runs}]
checkpoints: [{checkpoints}]
"""


@dataclass(frozen=True, slots=True)
class Treated:
    """What came of it: the held-out loss, the daemon's incidents, how many rollbacks were made and how many a person approved."""

    loss: float
    incidents: list[dict[str, Any]]
    rollbacks: int
    approved: int
    targets: list[int]
    seconds: float


def treat(job: Job) -> Treated:
    """Run a job under supervision until it has ended and nothing is open.

    Raises:
        RunError: a part of it ended that should not, or it took too long.
    """
    begun = time.monotonic()
    job = msgspec.structs.replace(job, pace=PACE)
    job.write()
    daemon_at, ops = _configure(job)
    approved: set[str] = set()
    with ending([]) as processes:
        daemon = start(processes, "the daemon", _daemon(ops), ops / "daemon.log")
        receiver = start(
            processes, "the receiver", [*trainwarden(), "receiver", "--config", str(ops / "receiver.yml")], ops / "receiver.log"
        )  # fmt: skip
        addresses = json.loads((ops / "addresses.json").read_text())
        _wait_for_both(addresses, [daemon, receiver])
        supervise = [*trainwarden(), "supervise", "--run", job.kind, "--dir", str(job.root / "runs"), "--"]
        own = {
            "PYTHONPATH": os.pathsep.join(filter(None, (str(BENCH), os.environ.get("PYTHONPATH")))),
            "OMP_NUM_THREADS": "1",
        }
        trainer = start(processes, "the training", [*supervise, *command(job)], job.root / "train.log", own)
        api = Daemon(daemon_at)
        rows: list[dict[str, Any]] = []
        ended: float | None = None
        while ended is None or (time.monotonic() - ended < AFTER and any(_open(row) for row in rows)):
            time.sleep(0.3)
            daemon.must_run()
            receiver.must_run()
            if ended is None and trainer.popen.poll() is not None:
                ended = time.monotonic()
            if time.monotonic() - begun > WHOLE:
                raise RunError(f"{job.kind}: not over after {WHOLE:.0f} s; see {ops} and {job.root / 'train.log'}")
            rows = api.incidents() or rows
            _approve(rows, approved, ops)
    if trainer.popen.returncode != 0 and not (job.root / "heldout.json").exists():
        tail = (job.root / "train.log").read_text(errors="replace").splitlines()[-25:]
        raise RunError(f"{job.kind}: the training ended with {trainer.popen.returncode}:\n" + "\n".join(tail))
    ledger = RunFolder(job.kind, job.root / "runs").ledger()
    entries = ledger.entries if ledger else []
    loss = float(json.loads((job.root / "heldout.json").read_text())["loss"])
    targets = [entry.target_step for entry in entries]
    return Treated(loss, rows, len(entries), len(approved), targets, time.monotonic() - begun)


def _open(row: dict[str, Any]) -> bool:
    return row["state"] in ("watching", "confirmed", "awaiting_approval", "acting", "verifying")


def _daemon(ops: Path) -> list[str]:
    return [*trainwarden(), "run", "--config", str(ops / "trainwarden.yml")]


def _configure(job: Job) -> tuple[str, Path]:
    ops = job.root / "ops"
    ops.mkdir(parents=True, exist_ok=True)
    checkpoints = job.root / "checkpoints"
    for folder in (job.root / "runs", checkpoints):
        folder.mkdir(exist_ok=True)
    with socket.socket() as first, socket.socket() as second:
        for probe in (first, second):
            probe.bind(("127.0.0.1", 0))
        daemon, receiver = (f"127.0.0.1:{probe.getsockname()[1]}" for probe in (first, second))
    for name, text in (
        ("secret", f"whsec_{base64.b64encode(secrets.token_bytes(32)).decode()}\n"),
        ("token", f"{secrets.token_urlsafe(32)}\n"),
    ):
        (ops / name).touch(mode=0o600)
        (ops / name).write_text(text)
    values = {
        "daemon": daemon,
        "receiver": receiver,
        "targets": f"{glob.escape(str(job.root / 'runs'))}/*/targets",
        "policy": POLICY,
        "webhook": f"http://{receiver}/webhook",
        "requests": f"http://{receiver}/api/v1/requests",
        "secret": str(ops / "secret"),
        "token": str(ops / "token"),
        "db": str(ops / "receiver.db"),
        "runs": str(job.root / "runs"),
        "checkpoints": str(checkpoints),
    }
    quoted = {name: json.dumps(value) for name, value in values.items()}
    for name, text in (("trainwarden.yml", CONFIG), ("receiver.yml", RECEIVER)):
        (ops / name).write_text(text.format(**quoted))
    (ops / "addresses.json").write_text(json.dumps([daemon, receiver]))
    return daemon, ops


def _wait_for_both(addresses: list[str], processes: list[Process]) -> None:
    end = time.monotonic() + UP
    while not all(is_up(address) for address in addresses):
        for process in processes:
            process.must_run()
        if time.monotonic() > end:
            raise RunError(f"daemon or receiver does not answer after {UP:.0f} s; see {processes[0].log.parent}")
        time.sleep(0.2)


def _approve(rows: list[dict[str, Any]], approved: set[str], ops: Path) -> None:
    """Approve what waits for it, as a person would who has read the plan."""
    for row in rows:
        plan = row.get("plan")
        if row["state"] != "awaiting_approval" or not plan or plan["plan_id"] in approved:
            continue
        asked = [*trainwarden(), "incidents", "approve", row["id"], "--plan", plan["plan_id"]]
        asked += [
            "--token-file",
            str(ops / "token"),
            "--url",
            f"http://{json.loads((ops / 'addresses.json').read_text())[0]}",
        ]
        done = subprocess.run(asked, capture_output=True, text=True, timeout=60, check=False)
        if done.returncode == 0:
            approved.add(plan["plan_id"])
