"""``RUN/supervisor.json``: what a supervisor must know of its predecessor to leave no orphan and start no twin.

Replaced whole at each change. Process ids stand beside start times and the id of the boot, so that a reused
process id is never taken for the old tree.
"""

from __future__ import annotations

from typing import Literal

import msgspec

from trainwarden.runfolder import RunFolder, RunFolderError, write_whole

from .processes import Process

#: ``clearing``: the predecessor's tree is being ended. ``starting``: an attempt is chosen, its process not yet up.
#: ``running``. ``ending``: the tree is being ended. ``waiting``: pause before a restart after a crash. The rest are final:
#: ``stopped`` by a request, ``finished`` with exit code 0, ``failed`` for good, ``interrupted`` by a signal.
Phase = Literal["clearing", "starting", "running", "ending", "waiting", "stopped", "finished", "failed", "interrupted"]

FINAL: tuple[Phase, ...] = ("stopped", "finished", "failed", "interrupted")


class State(msgspec.Struct, kw_only=True):
    """Contents of the file. ``attempt`` is the newest attempt that was ever chosen, -1 before the first.

    ``restarts`` counts restarts after crashes since the last progress. ``plan_id`` is the plan that lay in the folder
    for this attempt when it was chosen. ``request_id`` is the request that is ending the attempt; ``stop`` says that
    nothing is to be started after it.
    """

    boot: str
    host: str
    supervisor: Process
    command: list[str]
    folder: str
    grace: float
    attempt: int = -1
    restarts: int = 0
    phase: Phase = "clearing"
    keeper: Process | None = None
    trainer: Process | None = None
    plan_id: str | None = None
    request_id: str | None = None
    stop: bool = False
    last_exit: int | None = None
    error: str = ""


def read_state(run: RunFolder) -> State | None:
    """Return the state of the newest supervisor of this run, or None if there never was one.

    Raises:
        RunFolderError: the file cannot be read.
    """
    path = run.path / "supervisor.json"
    try:
        return msgspec.json.decode(path.read_bytes(), type=State)
    except FileNotFoundError:
        return None
    except msgspec.DecodeError as error:
        raise RunFolderError(
            f"{path}: {error}; see with `ps` that no trainer of this run is left, then delete the file"
        ) from None


def write_state(run: RunFolder, state: State) -> None:
    """Replace the file, whole or not at all.

    Raises:
        OSError: the disk is full or the folder cannot be written.
    """
    write_whole(run.path / "supervisor.json", msgspec.json.format(msgspec.json.encode(state), indent=2) + b"\n")
