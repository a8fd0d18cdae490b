"""A real receiver process for tests, and signed requests to it."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import msgspec
import requests

from tests.real import wait_until
from trainwarden.plan import Plan, Target
from trainwarden.receiver.secretfile import read_secrets, write_new_secret
from trainwarden.runfolder import RunFolder
from trainwarden.webhook import TYPE_OF, Envelope, Request, encode_envelope, request_id, sign

#: ``die`` names a function of the receiver and when the process is to be killed: before its call, or after it.
RECEIVE = """
import os, signal, sys
import msgspec
from trainwarden.receiver import execution, intake, ledger, main, planfiles, settings
from trainwarden.receiver.schedulers import local
from trainwarden.runfolder import RunFolder

PLACES = {
    "accept": (ledger.Ledger, "accept"),
    "write_plan": (RunFolder, "write_plan"),
    "write_ledger": (RunFolder, "write_ledger"),
    "restart": (local.LocalScheduler, "restart"),
    "stop": (local.LocalScheduler, "stop"),
    "settle": (ledger.Ledger, "settle"),
}
raw, die = sys.argv[1:]
if die:
    when, _, name = die.partition(" ")
    place, attribute = PLACES[name]
    real = getattr(place, attribute)

    def last_call(*arguments, **named):
        if when == "after":
            real(*arguments, **named)
        os.kill(os.getpid(), signal.SIGKILL)

    setattr(place, attribute, last_call)
main.serve(settings.settings_from(msgspec.json.decode(raw)))
"""


class Receiving:
    """Receivers of one folder of runs: one database, one secret."""

    def __init__(self, base: Path, **settings: Any) -> None:
        self.base = base
        self.checkpoints = base / "checkpoints"
        self.checkpoints.mkdir()
        self.secret_file = base / "secret"
        write_new_secret(self.secret_file)
        self.secret = read_secrets(self.secret_file)[0]
        self.settings: dict[str, Any] = {
            "listen": "127.0.0.1:0",
            "secret_file": str(self.secret_file),
            "roots": [str(base)],
            "checkpoints": [],
            "db": str(base / "receiver.db"),
        } | settings
        self.started: list[subprocess.Popen[bytes]] = []
        self.url = ""

    def start(self, die: str = "") -> subprocess.Popen[bytes]:
        """Start a receiver and wait until it listens."""
        path = self.base / f"receiver-{len(self.started)}.log"
        with path.open("wb") as log:
            process = subprocess.Popen(
                [sys.executable, "-c", RECEIVE, msgspec.json.encode(self.settings).decode(), die], stderr=log
            )
        self.started.append(process)
        found = wait_until(
            lambda: re.search(r"listening url=(\S+)", path.read_text()) or process.poll() is not None,
            20,
            what="the receiver listens",
        )
        assert isinstance(found, re.Match), path.read_text()
        self.url = found.group(1)
        return process

    def said(self) -> str:
        """What the receivers have logged."""
        return "".join(path.read_text() for path in sorted(self.base.glob("receiver-*.log")))

    def checkpoint(self, name: str = "step-5.bin", data: bytes = b"weights") -> str:
        """Write a checkpoint file and return its path."""
        path = self.checkpoints / name
        path.write_bytes(data)
        return str(path)

    def envelope(
        self, run: RunFolder, action: str = "rollback", attempt: int = 0, expires: float = 600, **fields: Any
    ) -> Envelope:
        """Return a request for ``run``; ``fields`` replace those of the plan."""
        identity = run.identity()
        assert identity is not None
        plan: dict[str, Any] = {
            "plan_id": "p1",
            "run_uid": identity.run_uid,
            "for_attempt": attempt + 1,
            "action": action if action != "pin" else "rollback",
            "skip_samples": [(640, 704)],
        }
        if action in ("rollback", "pin"):
            plan["target"] = Target(attempt=0, step=5, path=str(self.checkpoints / "step-5.bin"))
        if action == "lower_lr":
            del plan["skip_samples"]
            plan |= {"for_attempt": attempt, "lr_factor": 0.5, "at_step": 100, "lr_steps": 50, "lr_return_steps": 20}
        now = datetime.now(UTC)
        return Envelope(
            type=TYPE_OF[action],
            timestamp=now.isoformat(),
            data=Request(
                run_uid=identity.run_uid,
                run=run.run,
                attempt=attempt,
                incident="i",
                verdict="divergence",
                cause="data",
                confidence=0.9,
                plan=Plan(**(plan | fields)),
                expires_at=(now + timedelta(seconds=expires)).isoformat(),
            ),
        )

    def send(self, envelope: Envelope | bytes, message_id: str = "", secret: str = "") -> requests.Response:
        """Sign and send a request; the id is the one that the contract gives it."""
        body = envelope if isinstance(envelope, bytes) else encode_envelope(envelope)
        if not message_id:
            assert isinstance(envelope, Envelope)
            message_id = id_of(envelope)
        headers = sign(secret or self.secret, message_id, datetime.now(UTC), body)
        return requests.post(f"{self.url}/webhook", data=body, headers=headers, timeout=20, allow_redirects=False)

    def status(self, envelope: Envelope) -> dict[str, Any]:
        """What the receiver says of a request."""
        answer = requests.get(f"{self.url}/api/v1/requests/{id_of(envelope)}", timeout=20)
        found: dict[str, Any] = answer.json()
        return found

    def wait_for(self, envelope: Envelope, status: str, seconds: float = 20) -> dict[str, Any]:
        """Wait until a request has come to an end."""
        try:
            wait_until(lambda: self.status(envelope)["status"] == status, seconds)
        except AssertionError:
            raise AssertionError(f"not {status}: {self.status(envelope)}; {self.said()}") from None
        return self.status(envelope)

    def end(self) -> None:
        """Kill whatever is left; for the end of a test."""
        for process in self.started:
            if process.poll() is None:
                process.kill()
            process.wait()


def id_of(envelope: Envelope, n: int = 0) -> str:
    """The webhook-id of a request."""
    return request_id(envelope.data.run_uid, envelope.data.attempt, envelope.action, n)


def mounted(path: Path, size: str) -> bool:
    """Mount a small file system of memory at ``path``; False where this user may not."""
    path.mkdir()
    done = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(path)], capture_output=True, check=False
    )
    return done.returncode == 0


def unmounted(path: Path) -> None:
    """Undo :func:`mounted`."""
    subprocess.run(["umount", "-l", str(path)], check=False, capture_output=True)


def fill(path: Path) -> None:
    """Fill the file system at ``path`` to the last byte."""
    with (path / "filler").open("wb", buffering=0) as file:
        try:
            while True:
                file.write(b"\0" * 4096)
        except OSError:
            pass
    os.sync()
