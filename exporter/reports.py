"""What a trainer reports beside its steps: events, and checkpoints with whether they are finite.

All of it goes to the drain thread in the order in which it happened, behind the start event; values on a device are fetched as
those of a step are. May be called from any thread: asynchronous saves end where they end.
"""

from __future__ import annotations

import difflib
import operator
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from trainwarden.record import EVENT_KINDS, Event

from .drain import Drain, Fetch, Happened
from .measure import norms
from .notices import Notices
from .sheet import Sheet
from .staging import Staging
from .watched import Watched, as_numbers

#: Kinds of events that mean something to whoever reads the records, a rank's failures among them.
MEANT = (*EVENT_KINDS, "phase", "error", "failure", "fault", "crash")
#: How alike two words are that are taken for one (difflib's ratio: "state" is a word of its own beside "stage", 0.8), and kinds of a
#: trainer's own that are remembered as looked at.
ALIKE, LOOKED_AT = 0.85, 256
#: The largest number of a step.
LARGEST = 2**63 - 1


class Reports:
    """The events of one start. Until :meth:`begin` they are kept back."""

    def __init__(self, drain: Drain, staging: Staging, watched: Watched, notices: Notices) -> None:
        self._drain = drain
        self._staging = staging
        self._watched = watched
        self._notices = notices
        self._early: list[Happened] | None = []
        self._own_kinds: set[str] = set()
        self._ended = False

    def begin(self, fields: dict[str, Any], step: int) -> None:
        """Record the start event, and behind it what was reported before."""
        self._drain.submit(Happened(Event(kind="start", time=time.time(), step=step, fields=fields)))
        early, self._early = self._early, None
        for event in early or ():
            self._drain.submit(event)

    def end(self, reason: str, code: int | None, step: int) -> None:
        """Record the exit event of a run that began; nothing comes after it."""
        if self._early is None:
            self._put("exit", step, {"reason": reason, "code": code})
        self._ended = True

    def event(self, kind: str, step: int, fields: dict[str, Any]) -> None:
        """Record an event; a field that is a tensor with one element becomes its value."""
        self._look_at_kind(str(kind))
        late: dict[str, Any] = {}
        sheet = Sheet()
        plain: dict[str, Any] = {}
        for name, value in fields.items():
            if isinstance(value, torch.Tensor) and value.numel() == 1:
                sheet.add(name, value)
            else:
                plain[name] = value
        with torch.no_grad():
            self._fetch(sheet, lambda values: late.update({name: float(v[0]) for name, v in values.items()}))
        self._put(str(kind), step, plain, late)

    def _look_at_kind(self, kind: str) -> None:
        """Say once that a word of the trainer's own may be meant for one that is known. It is recorded as it is."""
        if kind in MEANT or kind in self._own_kinds or len(self._own_kinds) >= LOOKED_AT:
            return
        self._own_kinds.add(kind)
        word = kind[:40].strip().lower().replace("-", "_").replace(" ", "_")
        near = difflib.get_close_matches(word, MEANT, n=1, cutoff=ALIKE)
        if near:
            says = f"an event of the kind {kind[:40]!r} is recorded, and means nothing to the rules: did you mean {near[0]!r}?"
            self._notices.say(f"kind of event {kind[:40]}", says)

    def checkpoint(self, step: int, path: str | os.PathLike[str], future: Any, finite: bool | None) -> None:
        """Record that a checkpoint is complete, now or when ``future`` is done."""
        where = str(Path(path).absolute())
        late: dict[str, Any] = {"finite": finite}
        if finite is None:
            self._look_for_nonfinite(late)
        done = getattr(future, "upload_completion", future)
        if done is None:
            self._put("checkpoint", step, {"path": where, "complete": True}, late)
        else:
            done.add_done_callback(lambda finished: self._saved(finished, step, where, late))

    def _look_for_nonfinite(self, late: dict[str, Any]) -> None:
        tensors = [as_numbers(parameter) for parameter in self._watched.params]
        tensors = [tensor for tensor in tensors if tensor.numel() and tensor.is_floating_point()]
        sheet = Sheet()
        with torch.no_grad():
            for _, sizes in norms(tensors, range(len(tensors))):
                sheet.add("nonfinite", (~torch.isfinite(sizes)).sum())
            self._fetch(sheet, lambda values: late.update(finite=not values["nonfinite"].any()))

    def _fetch(self, sheet: Sheet, take: Callable[[dict[str, Any]], None]) -> None:
        staged = self._staging.send(sheet) if sheet.tensors else None
        if staged is not None:
            self._drain.submit(Fetch(staged, take))

    def _saved(self, finished: Any, step: int, path: str, late: dict[str, Any]) -> None:
        """An asynchronous save is done; called on whatever thread did it."""
        try:
            failure = _failure(finished)
            if failure is None:
                self._put("checkpoint", step, {"path": path, "complete": True}, late)
            else:
                self._notices.fault(f"asynchronous save of {path}", failure)
                self._put("checkpoint", step, {"path": path, "complete": False, "error": str(failure)})
        except Exception as error:
            self._notices.fault("reporting a checkpoint", error)

    def _put(self, kind: str, step: int, fields: dict[str, Any], late: dict[str, Any] | None = None) -> None:
        if self._ended:
            return
        number = _whole(step)
        if number is None:  # a line that nobody could read
            sentence = f"the step of an event {kind[:40]!r} is {str(step)[:40]!r}, no whole number"
            if kind == "checkpoint":
                raise ValueError(f"{sentence}: it is left out")
            self._notices.say("step of an event", f"{sentence}: it is recorded without")
        happened = Happened(Event(kind=kind, time=time.time(), step=number, fields=fields), late)
        if self._early is None:
            self._drain.submit(happened)
        else:
            self._early.append(happened)


def _whole(step: Any) -> int | None:
    """Return a step as a whole number of 64 bits, None where it is none."""
    try:
        number = int(step) if isinstance(step, float) and step.is_integer() else operator.index(step)
    except TypeError:
        return None
    return number if -LARGEST <= number <= LARGEST else None


def _failure(finished: Any) -> BaseException | None:
    """Return the exception of a finished future, of whichever kind, or None."""
    if hasattr(finished, "exception"):
        failure: BaseException | None = finished.exception()
        return failure
    try:
        finished.value()
    except Exception as error:
        return error
    return None
