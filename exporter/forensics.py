"""Forensics: on request, a copy of the run's damaged state, with all that is needed to make the suspect step again.

Opt-in: the trainer says how its state is saved, and an operator lets the daemon ask (``policy.quarantine``)::

    exporter.forensics(save, keep=2, batches=64)

``save`` is given an empty folder and writes into it what a checkpoint holds. It is called on the training thread, at the end of
``exporter.step()``, in phase ``checkpoint``, on all ranks after the same step, and may issue collectives; it may return the future of an
asynchronous save. What it raises is said, and the run goes on. ``keep`` is how many copies lie in the run's folder at most, ``batches``
how many steps back from the saved one are told at least.

The request is a plan file like any other. A thread of this module's own looks for it, checks that there is room, agrees with
the other ranks and writes what belongs to the copy; the training thread compares two numbers a step. At the named step it waits for
``save``, and for what the ranks say to each other right before it, and for nothing else.

A copy lies in ``RUN/quarantine/incident-ID.partial`` until everything of every rank is there, and then without the suffix. It is never a
checkpoint: it is not reported as complete, and whoever chooses a target refuses it (:func:`trainwarden.runfolder.in_quarantine`).
"""

from __future__ import annotations

import math
import os
import shutil
import stat
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Protocol

import msgspec
import torch

from trainwarden.plan import Quarantine
from trainwarden.runfolder import QUARANTINED, RunFolder, write_whole

from . import random_state
from .forensics_agreed import Agreement
from .forensics_copy import Copies, Taken, Work
from .forensics_files import CHECKPOINT, PARTIAL, ForensicsError, Quarantined, load, rank_folder
from .identity import Identity
from .notices import Notices
from .plans_watched import PlanWatch
from .recorder import Recorder
from .reports import Reports
from .watched import Watched, local

#: Seconds between two looks for a request, and from a request to the step at which several ranks save, doubled at each new try.
LOOK_SECONDS, AHEAD_SECONDS = 0.5, 4.0
#: Steps that the named one lies ahead at least, and how often the ranks try to agree.
AHEAD_STEPS, TRIES = 4, 3
#: A copy needs room for the state twice, so that the trainer's own next checkpoint still fits, and so many bytes a rank for the rest.
ROOM, REST_BYTES = 2, 4 * 2**20
#: States of the random generators that are kept of the newest reported checkpoints.
REMEMBERED = 4
#: A step that is never reached.
NEVER = 2**63

Save = Callable[[Path], Any]


class Parts(Protocol):
    """What of an exporter's parts is needed here."""

    identity: Identity
    folder: RunFolder
    watched: Watched
    recorder: Recorder
    reports: Reports


class _Proposal(msgspec.Struct, frozen=True, kw_only=True):
    """What rank 0 tells the others: after which step of which start what is saved, and in which try to agree."""

    start_id: str
    number: int
    step: int
    request: Quarantine


def checked(save: Any, keep: Any, batches: Any) -> None:
    """Refuse arguments of :meth:`exporter.Exporter.forensics` that are of no use.

    Raises:
        TypeError, ValueError: so they are. The message names the argument.
    """
    if not callable(save):
        raise TypeError(f"save: {save!r} is no function of the folder to save in")
    for name, value in (("keep", keep), ("batches", batches)):
        if isinstance(value, bool) or not isinstance(value, int):
            raise TypeError(f"{name}: {value!r} is not a whole number")
        if value < 1:
            raise ValueError(f"{name}: {value} is not positive")


class Forensics(threading.Thread):
    """One per exporter that takes part. ``reached`` returns the last closed step, ``phase`` enters a phase."""

    def __init__(
        self,
        save: Save,
        keep: int,
        batches: int,
        parts: Parts,
        optimizers: Sequence[torch.optim.Optimizer],
        notices: Notices,
        reached: Callable[[], int],
        phase: Callable[[str], AbstractContextManager[None]],
    ) -> None:
        super().__init__(name="trainwarden-forensics", daemon=True)
        self._save, self._keep = save, keep
        self._folder, self._identity, self._watched = parts.folder, parts.identity, parts.watched
        self._optimizers, self._notices = list(optimizers), notices
        self._reached, self._phase = reached, phase
        self._copies = Copies(
            parts.folder,
            parts.identity,
            notices,
            batches,
            report=lambda step, fields: parts.reports.event("checkpoint", step, fields),
            start_line=lambda: parts.recorder.start_line,
        )
        self._devices = {local(parameter).device for parameter in parts.watched.params}
        self._home = parts.folder.quarantine_folder.absolute()
        self._work: Work | None = None
        self._taken: deque[Taken] = deque()
        self._handled: set[str] = set()
        self._plans = PlanWatch(parts.folder, notices)
        self._seen: Any = None
        self._began = (time.monotonic(), reached())
        self._over = threading.Event()
        #: The training thread calls :meth:`take` after the first step that is not below it.
        self.armed = NEVER

    # What the training thread calls.

    def take(self, step: int) -> None:
        """Save the state after ``step``, if the ranks agree. Waits for the trainer's function, and raises nothing of its."""
        work, self.armed = self._work, NEVER
        if work is None:
            return
        taken = Taken(work, step)
        try:
            taken.agreed = work.agreement is None or work.agreement.decide()
            if taken.agreed:
                self._call(taken)
        except Exception as error:
            taken.error = error
        except BaseException as error:  # Ctrl-C, or an exit: the trainer's to have, and what is half written is no copy
            taken.error = error
            raise
        finally:
            self._work = None
            self._taken.append(taken)

    def _call(self, taken: Taken) -> None:
        taken.random = random_state.capture(self._devices)
        began = time.monotonic()
        try:
            with self._phase("checkpoint"):
                taken.pending = self._save(taken.work.folder / CHECKPOINT)
        finally:
            taken.seconds = time.monotonic() - began
            random_state.restore(taken.random)  # whatever the function drew: the run goes on as if nobody had asked

    def checkpoint(self, step: int, path: str | os.PathLike[str]) -> bool:
        """Keep the random states of a checkpoint that is reported now; False where it is no checkpoint but a quarantined state."""
        if Path(path).absolute().is_relative_to(self._home):
            return False
        known = self._copies.random_at
        known.pop(step, None)
        known[step] = random_state.capture(self._devices)
        while len(known) > REMEMBERED:
            known.pop(next(iter(known)))
        return True

    def finish(self, seconds: float) -> None:
        """End, once the copy that was saved is complete, within ``seconds``."""
        self.armed = NEVER
        if self.is_alive():
            self._copies.deadline = time.monotonic() + seconds
            self._over.set()
            self.join(seconds)

    # The thread's own.

    def run(self) -> None:
        """Look for requests until :meth:`finish`."""
        self._guarded(self._pass_over_earlier)
        while not self._over.wait(LOOK_SECONDS):
            self._guarded(self._look)
        while self._taken and time.monotonic() < self._copies.deadline:
            self._guarded(self._look)
        if self._work is not None and self._identity.rank == 0:  # the named step was not reached
            shutil.rmtree(self._work.folder, ignore_errors=True)

    def _guarded(self, function: Callable[[], None]) -> None:
        try:
            function()
        except Exception as error:
            self._notices.fault("forensics", error)

    def _pass_over_earlier(self) -> None:
        """Leave alone what was asked before this start: the state that it asked for is gone."""
        if self._identity.rank == 0:
            self._handled |= {plan.quarantine.incident for plan in self._folder.read_plans()[0] if plan.quarantine}

    def _look(self) -> None:
        if self._taken:
            taken = self._taken.popleft()
            if taken.agreed or taken.error is not None:
                self._copies.settle(taken)
            elif self._identity.rank == 0:
                self._try_again(taken.work)
        elif self._work is None and not self._over.is_set():
            if self._identity.rank == 0:
                self._look_for_request()
            else:
                self._look_for_proposal()

    def _look_for_request(self) -> None:
        """On rank 0: find a plan that asks for a copy of this attempt's state."""
        for plan in self._plans.news():
            request = plan.quarantine
            if request is None or plan.for_attempt != self._identity.attempt or request.incident in self._handled:
                continue
            self._handled.add(request.incident)
            if not self._copies.outcome(request).exists():
                self._begin(request)
                self._plans.forget()  # there may be a further one
                return

    def _begin(self, request: Quarantine) -> None:
        """Make the folder of a copy, if there is room for it, and name the step."""
        quarantine = self._folder.quarantine_folder
        try:
            for left in list(quarantine.glob(f"incident-*{PARTIAL}")):  # by a start that was killed
                _take_away(left)
            kept = [entry for entry in quarantine.glob("incident-*") if entry.is_dir()]
        except OSError as error:
            self._end(request, f"{quarantine} cannot be made ready: {error}")
            return
        if _expired(request):
            self._end(request, f"the request expired at {request.expires_at}")
        elif self._reached() < request.suspect_step:
            self._end(request, f"the run has gone back behind step {request.suspect_step}: its damaged state is gone")
        elif len(kept) >= self._keep:
            self._end(request, f"{len(kept)} are kept already (keep={self._keep}); move one out of {quarantine}")
        else:
            folder = quarantine / f"incident-{request.incident}{PARTIAL}"
            try:
                (folder / CHECKPOINT).mkdir(parents=True)
                write_whole(folder / QUARANTINED, msgspec.json.format(msgspec.json.encode(request), indent=2) + b"\n")
                need, free = self._need(), shutil.disk_usage(folder).free
                if free < need:
                    raise OSError(f"{need} bytes must be free at {quarantine}, and {free} are")
                self._propose(request, folder, 0)
            except OSError as error:
                shutil.rmtree(folder, ignore_errors=True)
                self._end(request, f"there is no room: {error}")

    def _end(self, request: Quarantine, why: str) -> None:
        self._copies.end(request, why, self._reached())

    def _need(self) -> int:
        """Return how many bytes must be free, for the state of all ranks."""
        tensors = [local(parameter) for parameter in self._watched.params]
        for optimizer in self._optimizers:
            for state in list(optimizer.state.values()):
                tensors += [local(value) for value in list(state.values()) if isinstance(value, torch.Tensor)]
        size = sum(tensor.numel() * tensor.element_size() for tensor in tensors)
        ranks = self._identity.world_size if self._watched.split else 1
        return ROOM * size * ranks + REST_BYTES * self._identity.world_size

    # How the ranks come to the same step.

    def _propose(self, request: Quarantine, folder: Path, number: int) -> None:
        """On rank 0: name a step; the next one where there is no other rank."""
        if self._identity.world_size == 1:
            self._arm(Work(request, folder, number, 0, None))
            return
        seconds, steps = time.monotonic() - self._began[0], self._reached() - self._began[1]
        rate = max(steps, 0) / max(seconds, 1e-3)
        ahead = max(AHEAD_STEPS, math.ceil(AHEAD_SECONDS * rate)) * 2**number
        start_id = self._identity.start_id
        proposal = _Proposal(start_id=start_id, number=number, step=self._reached() + ahead, request=request)
        self._agreement(folder, number).prepare()
        write_whole(self._proposal, msgspec.json.encode(proposal))
        self._join_in(proposal)

    def _try_again(self, work: Work) -> None:
        """On rank 0: not every rank was there; name a step that lies further ahead."""
        absent = [] if work.agreement is None else work.agreement.absent()
        if work.number + 1 < TRIES and not _expired(work.request):
            self._propose(work.request, work.folder, work.number + 1)
            return
        shutil.rmtree(work.folder, ignore_errors=True)
        who = f" (absent: {', '.join(map(str, absent))})" if absent else ""
        hint = "exporter.forensics() belongs on every rank"
        self._end(work.request, f"the ranks did not come to the same step in {work.number + 1} tries{who}; {hint}")

    def _look_for_proposal(self) -> None:
        """On the other ranks: read what rank 0 has named. As a plan, it must be this user's, and nobody else's to write."""
        try:
            status = self._proposal.lstat()
        except FileNotFoundError:
            return
        if self._seen == (status.st_ino, status.st_mtime_ns):
            return
        self._seen = (status.st_ino, status.st_mtime_ns)
        open_to_others = status.st_mode & (stat.S_IRWXG | stat.S_IRWXO)
        if not stat.S_ISREG(status.st_mode) or status.st_uid not in (os.geteuid(), 0) or open_to_others:
            self._notices.say("proposal", f"{self._proposal}: is not this user's own file: not looked at")
            return
        try:
            proposal = msgspec.json.decode(self._proposal.read_bytes(), type=_Proposal)
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            self._notices.say("proposal", f"{self._proposal}: {error}")
            return
        if proposal.start_id == self._identity.start_id:
            self._join_in(proposal)

    def _join_in(self, proposal: _Proposal) -> None:
        request, number = proposal.request, proposal.number
        folder = self._folder.quarantine_folder / f"incident-{request.incident}{PARTIAL}"
        agreement = self._agreement(folder, number)
        self._arm(Work(request, folder, number, proposal.step, agreement))
        if self._reached() < proposal.step:  # else it may have been passed before it was armed
            agreement.armed()

    def _arm(self, work: Work) -> None:
        rank_folder(work.folder, self._identity.rank).mkdir(exist_ok=True)
        self._work = work
        self.armed = work.step  # last: from now on the training thread may take it

    def _agreement(self, folder: Path, number: int) -> Agreement:
        return Agreement(folder, number, self._identity.rank, self._identity.world_size)

    @property
    def _proposal(self) -> Path:
        return self._folder.quarantine_folder / "proposal.json"


def _take_away(path: Path) -> None:
    """Remove what lies at a path: a folder with all in it, of a link the link alone.

    Raises:
        OSError: it cannot be removed.
    """
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink()


def _expired(request: Quarantine) -> bool:
    return datetime.now(UTC) > datetime.fromisoformat(request.expires_at)


__all__ = ["Forensics", "ForensicsError", "Parts", "Quarantined", "Save", "checked", "load"]
