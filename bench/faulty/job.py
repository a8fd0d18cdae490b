"""What one training run is told: a file that the training program reads."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec


class Job(msgspec.Struct, frozen=True, kw_only=True):
    """One run of a kind. ``folder`` holds its text, its checkpoints and, under ``runs``, its records.

    ``stop_at``: the first attempt ends there with a checkpoint. ``pace``: seconds that a step takes at least, so that a daemon on a
    busy machine sees a run of 400 steps while it lasts.
    """

    kind: str
    seed: int
    folder: str
    values: dict[str, Any]
    steps: int
    stop_at: int | None = None
    pace: float = 0.0

    @property
    def root(self) -> Path:
        """Return its folder."""
        return Path(self.folder)

    @property
    def file(self) -> Path:
        """Return where it is written."""
        return self.root / "job.json"

    def write(self) -> Path:
        """Write it and return where."""
        self.root.mkdir(parents=True, exist_ok=True)
        self.file.write_bytes(msgspec.json.encode(self))
        return self.file


def read(path: Path) -> Job:
    """Read what :meth:`Job.write` wrote."""
    return msgspec.json.decode(path.read_bytes(), type=Job)
