"""The programs of the demo and what each of them is given: command lines, environments, configuration files.

What daemon and receiver get is written here and nowhere else, and none of it depends on where the poison lies.
"""

from __future__ import annotations

import base64
import glob
import json
import secrets
import socket
import sys
from dataclasses import dataclass, replace
from pathlib import Path

from trainwarden.plan import Ledger, LedgerEntry
from trainwarden.record import Ranges

from .layout import RUN, Layout
from .processes import Process, start, trainwarden
from .scale import Scale

# Every value is put in as a JSON string, which is also a YAML string, whatever characters the path holds.
DAEMON_CONFIG = """\
# Written by `trainwarden demo`.
listen: {daemon}
state: trainwarden.db
poll_interval: 500ms
tick_interval: 500ms
sources:
  - folder: {targets}
policy:
  mode: act                # without this line it observes and notifies, and never acts
receiver:
  url: {webhook}
  status_url: {requests}
  secret_file: {secret}
"""

RECEIVER_CONFIG = """\
# Written by `trainwarden demo`.
listen: {receiver}
secret_file: {secret}
db: {db}
roots: [{runs}]
checkpoints: [{checkpoints}]   # a plan's target must lie in one of these folders, or in a root
"""


@dataclass(frozen=True, slots=True)
class Addresses:
    """``host:port`` of the daemon's API and of the receiver."""

    daemon: str
    receiver: str


def training_command(layout: Layout, arm: str, seed: int, scale: Scale) -> list[str]:
    """Return the command line of one training run.

    It is the same for all arms but for the folder, the run's name and how many checkpoints stay: nobody rolls the runs
    back that are there for comparison, and these keep the newest one alone.
    """
    scale = scale if arm == "treated" else replace(scale, keep_checkpoints=1)
    return [
        *(sys.executable, "-m", "trainwarden.demo.train"),
        *("--data", str(layout.data), "--out", str(layout.arm(arm)), "--run", layout.run_folder(arm).run),
        *("--seed", str(seed), "--port", "0", *scale.options()),
    ]


def start_comparison(among: list[Process], layout: Layout, arm: str, seed: int, scale: Scale) -> Process:
    """Start the ``clean`` or the ``untreated`` run: the same training, with nobody who would act."""
    command = training_command(layout, arm, seed, scale)
    return start(among, arm, command, layout.arm(arm) / "train.log", {"TRAINWARDEN_DIR": str(layout.runs(arm))})


def substitute(layout: Layout, arm: str, ranges: Ranges) -> None:
    """Have an arm substitute these sample positions from its first step on, as if a plan had said so."""
    folder = layout.run_folder(arm)
    identity = folder.open_identity()
    entry = LedgerEntry(plan_id="known-in-advance", for_attempt=0, target_step=0, skip_samples=ranges)
    folder.write_ledger(Ledger(run_uid=identity.run_uid, entries=[entry]))


def configure(layout: Layout) -> Addresses:
    """Write the configuration of daemon and receiver, and the secret that they share."""
    addresses = Addresses(*_free_addresses())
    secret = layout.ops / "secret"
    secret.touch(mode=0o600)
    secret.write_text(f"whsec_{base64.b64encode(secrets.token_bytes(32)).decode()}\n")
    runs, checkpoints = layout.runs("treated"), layout.arm("treated") / "checkpoints"
    for folder in (runs, checkpoints):
        folder.mkdir()
    values = {
        "daemon": addresses.daemon,
        "targets": f"{glob.escape(str(runs))}/*/targets",
        "webhook": f"http://{addresses.receiver}/webhook",
        "requests": f"http://{addresses.receiver}/api/v1/requests",
        "secret": secret,
        "receiver": addresses.receiver,
        "db": layout.ops / "receiver.db",
        "runs": runs,
        "checkpoints": checkpoints,
    }
    quoted = {name: json.dumps(str(value)) for name, value in values.items()}
    for name, text in (("trainwarden.yml", DAEMON_CONFIG), ("receiver.yml", RECEIVER_CONFIG)):
        (layout.ops / name).write_text(text.format(**quoted))
    return addresses


def daemon_command(layout: Layout) -> list[str]:
    """Return the daemon's command line."""
    return [*trainwarden(), "run", "--config", str(layout.ops / "trainwarden.yml")]


def receiver_command(layout: Layout) -> list[str]:
    """Return the receiver's command line."""
    return [*trainwarden(), "receiver", "--config", str(layout.ops / "receiver.yml")]


def supervise_command(layout: Layout, seed: int, scale: Scale) -> list[str]:
    """Return the command line that runs the treated training under a supervisor."""
    training = training_command(layout, "treated", seed, scale)
    return [*trainwarden(), "supervise", "--run", RUN, "--dir", str(layout.runs("treated")), "--", *training]


def log_of(layout: Layout, name: str) -> Path:
    """Return the log of the daemon, the receiver or the supervised training."""
    return (layout.arm("treated") if name == "train" else layout.ops) / f"{name}.log"


def _free_addresses() -> tuple[str, str]:
    # The receiver's address stands in the daemon's configuration before either has bound its port.
    with socket.socket() as first, socket.socket() as second:
        for probe in (first, second):
            probe.bind(("127.0.0.1", 0))
        return f"127.0.0.1:{first.getsockname()[1]}", f"127.0.0.1:{second.getsockname()[1]}"
