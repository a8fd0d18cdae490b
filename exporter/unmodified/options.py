"""What ``trainwarden exec`` was told, as the processes below it find it in their environment."""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from typing import Any

#: The options as a JSON object; it is there in every process below ``trainwarden exec``.
VARIABLE = "TRAINWARDEN_EXEC"
#: Process id of a trainer that is watched, for the processes that it starts.
ATTACHED = "TRAINWARDEN_EXEC_ATTACHED"


@dataclass(frozen=True, slots=True)
class Options:
    """Host to serve on, port of local rank 0 (None: the usual one), and cadence of the costly probes (None: the usual one)."""

    host: str = "127.0.0.1"
    port: int | None = None
    cadence: int | None = None

    def arguments(self) -> dict[str, Any]:
        """Return the exporter's arguments in this process. Run and folder are in the environment under names of their own."""
        found: dict[str, Any] = {"host": self.host}
        if self.port is not None:
            local_rank = os.environ.get("LOCAL_RANK", os.environ.get("SLURM_LOCALID", ""))
            # 0 is any free port, for every rank
            found["port"] = self.port + int(local_rank) if self.port and local_rank.isdecimal() else self.port
        if self.cadence is not None:
            found["cadence"] = self.cadence
        return found


def options() -> Options | None:
    """Return the options of this process, None where it does not run below ``trainwarden exec``.

    Raises:
        ValueError: somebody else wrote the variable.
    """
    text = os.environ.get(VARIABLE)
    if not text:
        return None
    given = json.loads(text)
    if not isinstance(given, dict):
        raise ValueError(f"{VARIABLE}: {text!r} is no JSON object")
    return Options(given.get("host") or "127.0.0.1", given.get("port"), given.get("cadence"))


def mark_attached() -> None:
    """Say to the processes that this one will start that the run is being watched here."""
    os.environ[ATTACHED] = str(os.getpid())


def attached_above() -> bool:
    """Say whether a process above this one is the trainer that is watched."""
    return os.environ.get(ATTACHED, str(os.getpid())) != str(os.getpid())
