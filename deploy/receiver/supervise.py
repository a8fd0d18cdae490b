"""``trainwarden supervise``: runs a training command, starts it again after a crash or a rollback, leaves no orphan.

One supervisor a run folder. Each attempt runs under a keeper of its own (see ``keeper``), which ends the whole tree when
the supervisor dies; a supervisor that finds the tree of a dead predecessor ends it before it starts anything. The supervisor
knows nothing of webhooks and judges nothing: it obeys its socket, signals and exit codes.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from trainwarden.runfolder import RunFolder, base_folder

from . import locks
from .state import read_state
from .supervisor import Supervisor


class SupervisorBusyError(RuntimeError):
    """Another supervisor has this run."""


def supervise(
    command: Sequence[str],
    *,
    run: str,
    base: Path | None = None,
    grace: float = 30.0,
    max_restarts: int = 3,
) -> int:
    """Run ``command`` as the trainer of ``run`` until it is done, and return the exit code to pass on.

    Takes over the signal handlers of the process; call it on the main thread. ``base`` is the folder of runs
    (default ``$TRAINWARDEN_DIR``, else ``./.trainwarden``). ``grace``: seconds from the first signal to SIGKILL.
    ``max_restarts``: restarts after crashes in a row; a completed checkpoint or ten minutes of running count as
    progress and start the count again; restarts for a rollback do not count.

    The exit code is the trainer's, 128 + n if signal n ended it, 127 or 126 if it could not be started, and 3 after a
    stop by request.

    Raises:
        ValueError: no command, or a negative number.
        RunFolderError: the run's name or its files cannot be used.
        SupervisorBusyError: another supervisor has this run.
        OSError: the run folder cannot be written.
    """
    if not command:
        raise ValueError("no command: trainwarden supervise --run NAME -- CMD…")
    if grace < 0 or max_restarts < 0:
        raise ValueError("grace and max_restarts must not be negative")
    folder = RunFolder(run, (base or base_folder()).absolute())
    identity = folder.open_identity()
    lock = locks.take(folder.path / "supervisor.lock")
    if lock is None:
        before = read_state(folder)
        who = f" (pid {before.supervisor.pid} on {before.host})" if before else ""
        raise SupervisorBusyError(
            f"{folder.path}: another supervisor{who} has this run; stop it, or choose another --run"
        )
    try:
        return Supervisor(folder, identity.run_uid, list(command), grace, max_restarts, read_state(folder)).run()
    finally:
        os.close(lock)
