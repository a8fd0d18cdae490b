"""Which steps are looked at closely, and who asked: the only part that the exporter knows, once somebody has asked."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from trainwarden.exporter.assembly import Parts
from trainwarden.exporter.drain import Happened
from trainwarden.exporter.groups import clean
from trainwarden.exporter.inside import Inside
from trainwarden.exporter.notices import Notices
from trainwarden.plan import CloseLook, PlanError, check_look
from trainwarden.record import Event

from .findings import Named
from .hooks import Found
from .lines import Lines
from .look import MODULES, Looking
from .reading import Reader


class CloseLooks:
    """Begins and ends the looks of one exporter. Training thread.

    What is asked for while one is on, or where one follows on the other, becomes part of it. ``over``: nothing is left to do, and nothing of
    it is left in torch.
    """

    def __init__(
        self, parts: Parts, model: nn.Module, optimizers: Sequence[torch.optim.Optimizer], notices: Notices
    ) -> None:
        self._parts = parts
        self._model = model
        self._optimizers = list(optimizers)
        self._notices = notices
        self._asked: list[tuple[CloseLook, str]] = []
        self._looking: Looking | None = None
        self._ended: Looking | None = None
        self._reader: Reader | None = None
        self._first = 0
        self.over = False

    def ask(self, look: CloseLook, by: str, step: int) -> None:
        """Look at these steps; ``by`` is ``plan``, ``call`` or ``setting``, ``step`` the one that is open.

        Raises:
            PlanError: the look cannot be meant, or all of its steps are over.
        """
        check_look(look)
        if look.end <= step:
            raise PlanError(f"steps {look.first_step} to {look.end - 1} are over: step {step} is next")
        self._asked.append((look, by))
        self.over = False
        self._prepare()
        if look.first_step <= step:
            self.opened(step)

    def _prepare(self) -> None:
        """Have everything that may wait done before the first step of it."""
        if self._looking is not None:
            return
        parts, identity = self._parts, self._parts.identity
        found = Found(self._model, MODULES)
        self._named = Named(
            modules=found.names,
            parameters=[clean(name) for name in parts.watched.names],
            holding={n for n, one in enumerate(found.modules) if next(one.parameters(), None) is not None},
            ranks=identity.world_size,
        )
        structure = next((one.structure for one in parts.observer.beside if isinstance(one, Inside)), None)
        folder = parts.folder.journal(identity.attempt, identity.start_id, identity.rank)
        lines = Lines(folder, sum(look.steps for look, _ in self._asked))
        self._reader = Reader(self._named, structure, lines, self._notices)
        self._looking = Looking(
            found,
            self._optimizers,
            parts.watched,
            parts.observer,
            parts.drain,
            self._notices,
            take=self._reader.take,
            late=self._record,
        )
        self._file = str(lines.path.relative_to(parts.folder.path))

    def _record(self, kind: str, step: int, fields: dict[str, Any]) -> None:
        """Record an event of a step that is never closed. Drain thread: what is queued already may be the exit event."""
        self._parts.recorder.event(Event(kind=kind, time=time.time(), step=step, fields=fields))

    def opened(self, step: int) -> None:
        """A step is open: begin, go on, or end."""
        now = [(look, by) for look, by in self._asked if look.first_step <= step < look.end]
        looking = self._looking
        if now and looking is not None:
            if not self._first:
                self._first = step
                self._tell_of_beginning(now[0][0], now[0][1], step)
            if looking.on or self._first == step:  # else a fault has ended it
                looking.begin(step, any(look.check_nan for look, _ in now))
        elif self._first:
            self.end(step - 1)
        if self._ended is not None and self._ended.settled():
            self._ended = None
        self.over = self._looking is None and self._ended is None

    def end(self, last: int) -> None:
        """End what is on, ``last`` being the last step that was closed."""
        looking, reader = self._looking, self._reader
        if looking is None or reader is None or not self._first:
            return
        looking.detach()
        fields = {
            "state": "ended",
            "first_step": self._first,
            "last_step": last,
            "file": self._file,
            "absent": list(looking.absent.values()),
        }
        event = Event(kind="anomaly", time=time.time(), step=last, fields=fields)
        self._parts.drain.submit(Happened(event, reader.summary))
        self._first, self._ended, self._looking, self._reader = 0, looking, None, None
        self._asked = [(look, by) for look, by in self._asked if look.end > last + 1]
        if self._asked:
            self._prepare()

    def _tell_of_beginning(self, look: CloseLook, by: str, step: int) -> None:
        fields: dict[str, Any] = {
            "state": "begun",
            "asked_by": by,
            "first_step": step,
            "steps": look.end - step,
            "modules": len(self._named.modules),
            "parameters": len(self._named.parameters),
        }
        if look.check_nan:
            fields["check_nan"] = True
        self._parts.reports.event("anomaly", step - 1, fields)
