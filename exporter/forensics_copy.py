"""Writes what belongs to a copy of a damaged state, and decides whether it is whole. On the thread of :mod:`exporter.forensics` alone.

Each rank writes its part and says so in a file; rank 0 waits for all of them and gives the folder its name. What is not whole is
taken away, and why is said in the log, in the record, and in a file beside where it would have been.
"""

from __future__ import annotations

import math
import os
import shutil
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import torch

from trainwarden.plan import Quarantine
from trainwarden.runfolder import RunFolder, write_whole

from .forensics_agreed import Agreement
from .forensics_files import CHECKPOINT, POSITIONS, RANDOM, WHOLE, positions_of, rank_folder
from .identity import Identity
from .notices import Notices
from .random_state import States

#: Longest waits, in seconds: for the other ranks' parts of a copy, and for the record of the step that was saved.
PARTS_SECONDS, RECORD_SECONDS = 900.0, 10.0
#: What is left between two looks for them.
WAIT_SECONDS = 0.1


@dataclass(slots=True)
class Work:
    """A copy that is to be made after ``step``, the ``number``-th try; ``agreement`` is None where there is one rank."""

    request: Quarantine
    folder: Path
    number: int
    step: int
    agreement: Agreement | None


@dataclass(slots=True)
class Taken:
    """What the training thread did for a work. ``agreed``: all ranks saved; ``error`` is what the trainer's function raised.

    ``pending`` is what that function returned, ``random`` the states before its call.
    """

    work: Work
    step: int
    agreed: bool = False
    seconds: float = 0.0
    random: States | None = None
    error: BaseException | None = None
    pending: Any = None


class Copies:
    """The copies of one start, as one rank sees them. ``report`` records an event, ``start_line`` is the start event's."""

    def __init__(
        self,
        folder: RunFolder,
        identity: Identity,
        notices: Notices,
        batches: int,
        report: Callable[[int, dict[str, Any]], None],
        start_line: Callable[[], bytes | None],
    ) -> None:
        self._folder, self._identity, self._notices = folder, identity, notices
        self._batches = batches
        self._report, self._start_line = report, start_line
        #: Random states of the newest reported checkpoints, by step.
        self.random_at: dict[int, States] = {}
        #: Until when closing waits, on the monotonic clock.
        self.deadline = math.inf

    def outcome(self, request: Quarantine) -> Path:
        """Return the file that says how a request ended."""
        return self._folder.quarantine_folder / f"incident-{request.incident}.json"

    def settle(self, taken: Taken) -> None:
        """Complete this rank's part of what was saved; on rank 0, then the whole."""
        work, error = taken.work, taken.error
        mine = rank_folder(work.folder, self._identity.rank)
        try:
            error = error or self._awaited(taken.pending)
            if error is None:
                self._write_part(taken, mine)
        except Exception as failure:
            error = failure
        why = None if error is None else f"{type(error).__name__}: {error}".removesuffix(": ")
        if self._identity.rank == 0:
            self._complete(taken, why)
            return
        self._say_done(mine, why)
        if why is not None:
            self._notices.say("quarantine", f"no quarantined checkpoint of incident {work.request.incident}: {why}")

    def _awaited(self, pending: Any) -> BaseException | None:
        """Wait for an asynchronous save, where the function returned its future; return what went wrong with it."""
        future = getattr(pending, "upload_completion", pending)
        if not callable(getattr(future, "done", None)):
            return None
        end = time.monotonic() + PARTS_SECONDS
        while not future.done():
            if not self._wait(end):
                return TimeoutError("the save did not end")
        try:
            future.result() if hasattr(future, "result") else future.value()
        except Exception as error:
            return error
        return None

    def _write_part(self, taken: Taken, mine: Path) -> None:
        torch.save({"after": taken.random, "checkpoints": dict(self.random_at)}, mine / RANDOM)
        identity, end = self._identity, time.monotonic() + RECORD_SECONDS
        journal = self._folder.journal(identity.attempt, identity.start_id, identity.rank)
        while True:
            request = taken.work.request
            positions = positions_of(journal, self._start_line(), identity, request, taken.step, self._batches)
            if (positions.steps and positions.steps[-1].step >= taken.step) or not self._wait(end):
                break  # of a run that ends right now the last records may be missing
        write_whole(mine / POSITIONS, msgspec.json.format(msgspec.json.encode(positions), indent=1) + b"\n")

    def _say_done(self, mine: Path, why: str | None) -> None:
        """Tell rank 0 that this rank's part is there, or why not; on a disk that is full, in the room of what it has written."""
        try:
            write_whole(mine / "done.json", msgspec.json.encode({"error": why}))
        except OSError as error:
            for path in mine.iterdir():
                path.unlink()
            write_whole(mine / "done.json", msgspec.json.encode({"error": why or str(error)}))

    def _complete(self, taken: Taken, why: str | None) -> None:
        """On rank 0: wait for the other ranks' parts, and give the folder its name; take away what is not whole."""
        request, folder = taken.work.request, taken.work.folder
        end = time.monotonic() + PARTS_SECONDS
        for rank in range(1, self._identity.world_size):  # nothing is taken away while one of them still writes
            found = self._part(rank_folder(folder, rank) / "done.json", end)
            if found is not None:
                why = why or f"rank {rank}: {found}"
        whole = self._folder.quarantine_folder / f"incident-{request.incident}"
        if why is None:
            try:
                if not any((folder / CHECKPOINT).iterdir()):
                    raise OSError("the function that was to save wrote nothing into the folder that it was given")
                (folder / WHOLE).touch()
                _sync(folder)
                folder.rename(whole)
            except OSError as error:
                why = f"{type(error).__name__}: {error}"
        if why is not None:
            shutil.rmtree(folder, ignore_errors=True)
            self.end(request, why, taken.step)
            return
        self._write_outcome(request, None, taken.step)
        fields = {"path": str((whole / CHECKPOINT).absolute()), "quarantined": True, "incident": request.incident}
        self._report(taken.step, {**fields, "seconds": round(taken.seconds, 3)})

    def _part(self, path: Path, end: float) -> str | None:
        """Wait for what another rank says of its part: None where it is there, else why not."""
        while True:
            try:
                error = msgspec.json.decode(path.read_bytes())["error"]
                return None if error is None else str(error)
            except (OSError, msgspec.DecodeError):
                if not self._wait(end):
                    return "it did not finish its part"

    def end(self, request: Quarantine, why: str, step: int) -> None:
        """There will be no copy: say why."""
        sentence = f"no quarantined checkpoint of incident {request.incident}: {why}"
        self._notices.say(f"quarantine {request.incident}", sentence)
        self._write_outcome(request, why, step)
        path = self._folder.quarantine_folder / f"incident-{request.incident}" / CHECKPOINT
        fields = {"path": str(path.absolute()), "quarantined": True, "complete": False, "incident": request.incident}
        self._report(step, {**fields, "error": why})

    def _write_outcome(self, request: Quarantine, error: str | None, step: int) -> None:
        outcome = {"incident": request.incident, "saved": error is None, "step": step, "error": error}
        try:
            write_whole(self.outcome(request), msgspec.json.format(msgspec.json.encode(outcome), indent=2) + b"\n")
        except OSError as failure:
            self._notices.fault("quarantined checkpoint", failure)

    def _wait(self, end: float) -> bool:
        """Wait a little; False once ``end`` or the time for closing is over."""
        time.sleep(WAIT_SECONDS)
        return time.monotonic() < min(end, self.deadline)


def _sync(folder: Path) -> None:
    """Have the disk hold what lies in a folder, before its name says that it is whole."""
    for path in (*folder.rglob("*"), folder, folder.parent):
        if path.is_file() or path.is_dir():
            descriptor = os.open(path, os.O_RDONLY)
            try:
                os.fsync(descriptor)
            finally:
                os.close(descriptor)
