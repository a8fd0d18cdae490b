"""How the ranks agree on the step after which all of them save: through files of the run's folder, without a collective.

A save of several ranks hangs where one of them does not take part. So a step is named that lies ahead; a rank whose training
thread has not got there yet, and will look for it there, says so (:meth:`Agreement.armed`); and the first rank to get
there decides for all, once: to save where every rank has said so, else not to. A link that exists is not made a second time,
on a network's disk neither, and making one needs no room on the disk: its two possible contents lie ready. A rank that comes too
late has not said that it takes part, so nobody waits for it.
"""

from __future__ import annotations

import os
import time
from pathlib import Path

#: Longest time that a decision is looked for which somebody else is making, and what is left between two looks, in seconds.
LOOK_SECONDS, PAUSE_SECONDS = 10.0, 0.01
_YES, _NO = b"save\n", b"pass\n"


class Agreement:
    """One attempt of ``world_size`` ranks at saving together, the ``number``-th in ``folder``."""

    def __init__(self, folder: Path, number: int, rank: int, world_size: int) -> None:
        self._folder = folder
        self._number = number
        self._rank = rank
        self._world_size = world_size

    def prepare(self) -> None:
        """Lay the two possible decisions ready. On rank 0, before the others are told.

        Raises:
            OSError: they cannot be written.
        """
        self._path("save").write_bytes(_YES)
        self._path("pass").write_bytes(_NO)

    def armed(self) -> None:
        """Say that this rank will be there.

        Raises:
            OSError: it cannot be said.
        """
        self._path(f"rank-{self._rank}").touch()

    def absent(self) -> list[int]:
        """Return the ranks that have not said that they will be there."""
        return [rank for rank in range(self._world_size) if not self._path(f"rank-{rank}").exists()]

    def decide(self) -> bool:
        """Say whether all ranks save: what the first rank to ask was answered. Called at the step, on the training thread.

        Raises:
            OSError: the folder is gone.
        """
        decision = self._path("decision")
        wanted = self._path("pass" if self.absent() else "save")
        end = time.monotonic() + LOOK_SECONDS
        while True:
            try:
                os.link(wanted, decision)
            except FileExistsError:
                pass
            except OSError:
                if time.monotonic() > end:
                    raise
            try:
                return decision.read_bytes() == _YES
            except FileNotFoundError:
                if time.monotonic() > end:
                    raise
            time.sleep(PAUSE_SECONDS)

    def _path(self, name: str) -> Path:
        return self._folder / f"agree-{self._number}-{name}"
