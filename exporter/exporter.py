"""The exporter as a trainer meets it: four lines around a training loop.

Everything public here may be called from the training loop at any time and raises nothing into it (but for arguments of a
wrong type when the exporter is made): a fault of ours is caught, said once, counted. With ``TRAINWARDEN_DISABLE=1``, and
where it cannot be put together, nothing is observed, written, served or hooked; the script steps, reads its data and
resumes as it would otherwise.
"""

from __future__ import annotations

import os
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from trainwarden.plan import Target
from trainwarden.runfolder import RunFolder

from .asks import TellsPlans
from .assembly import Parts, assemble
from .closely import LooksClosely
from .drain import Call, ClosedStep
from .ending import Ending
from .forensics import Forensics, Save, checked
from .identity import next_attempt
from .loader import Skips, WatchedLoader, watch
from .losses import MicroLosses
from .notices import Notices
from .resume import Resume
from .settings import Settings, disabled, optimizers_of
from .sheet import Reading
from .starting import start_fields
from .telling import TellsRouters
from .watched import Told

#: Longest time that closing waits for values that are still on their way.
DRAIN_SECONDS = 5.0


class Exporter(LooksClosely, TellsRouters, TellsPlans):
    """Watches one training process of a run.

    Example::

        exporter = Exporter(model, optimizer, run="gpt-7b")
        loader = exporter.wrap(loader)
        for batch in loader:
            ...
            optimizer.step()
            exporter.step(loss)  # closes the step's record

    Args:
        model: the module that is trained.
        optimizer: its optimizer, or a sequence of several.
        run: the run's display name; it names its folder.
        scaler: the GradScaler, where there is one. It is found by itself, too; this only tells the start event.
        dir: folder that holds all runs; default ``$TRAINWARDEN_DIR``, else ``./.trainwarden``.
        host, port: where to serve; default loopback, 17070 + local rank.
        roots: folders that checkpoints to resume from may lie in; None allows any.
        settings: further fields of :class:`exporter.settings.Settings`.

    With several ranks, make it on every rank after ``init_process_group``.

    Raises:
        TypeError, ValueError: an argument is of no use; the message names it.
    """

    #: What an adapter knows of the tensors that the optimizers update.
    _told: Told | None = None

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer | Sequence[torch.optim.Optimizer],
        run: str | None = None,
        *,
        scaler: Any = None,
        host: str = "127.0.0.1",
        port: int | None = None,
        dir: str | os.PathLike[str] | None = None,
        roots: Sequence[str | os.PathLike[str]] | None = None,
        **settings: Any,
    ) -> None:
        if not isinstance(model, nn.Module):
            raise TypeError(f"model: {type(model).__name__} is no torch.nn.Module")
        self._model = model
        self._optimizers = optimizers_of(optimizer)
        name = run if run is not None else os.environ.get("TRAINWARDEN_RUN") or "run"
        if not isinstance(name, str):
            raise TypeError(f"run: {name!r} is not a string")
        self._settings = Settings(
            run=name,
            host=host,
            port=port,
            folder=None if dir is None else Path(dir),
            roots=None if roots is None else tuple(Path(root) for root in roots),
            **settings,
        )
        self._folder = RunFolder(name, self._settings.folder)
        self._pid = os.getpid()
        self._notices = Notices()
        self._step = 0
        self._phase = "init"
        self._started = False
        self._finished = False
        self._loaders: list[Any] = []
        self._batches: list[Any] = []
        self._micro = MicroLosses()
        self._resume: Resume | None = None
        self._parts: Parts | None = None
        self._ending: Ending | None = None
        self._forensics: Forensics | None = None
        if disabled():
            return
        try:
            self._parts = assemble(
                model, self._optimizers, self._settings, self._folder, scaler, self._notices, self._told
            )
            self._ending = Ending(self._end)
            _alive.add(self)
            self._look_as_set()
        except Exception as error:
            self._notices.fault("attaching the exporter", error)

    # What a trainer calls.

    @property
    def global_step(self) -> int:
        """Number of the last closed step; 0 before the first."""
        return self._step

    @property
    def port(self) -> int | None:
        """The port that is served, or None."""
        return self._parts.serving.port if self._parts is not None else None

    @property
    def attempt(self) -> int | None:
        """The number of this attempt; where the exporter is off, the one that it would have. None: it cannot be read."""
        if self._parts is not None:
            return self._parts.identity.attempt
        try:
            return self._read_resume().attempt
        except Exception as error:
            self._notices.fault("choosing the attempt", error)
            return None

    @property
    def start_id(self) -> str | None:
        """The id of this start, or None where the exporter is off."""
        return self._parts.identity.start_id if self._parts is not None else None

    @property
    def notices(self) -> list[str]:
        """What went wrong or was done without so far, one sentence each."""
        return self._notices.said

    def wrap(
        self,
        loader: Any,
        *,
        seed: int = 0,
        order: Any = None,
        shards: Any = None,
        reserve: float = 0.01,
        dataset: str | None = None,
    ) -> Any:
        """Return a loader that knows the positions it hands out and leaves out what plans exclude.

        The arguments are those of :func:`exporter.loader.watch`. The same loader comes back where the exporter is off. Where
        ``watch`` refuses, the given loader itself is returned, and why is in :attr:`notices`: the run goes on without
        positions, skips and ``state_dict``.
        """

        def make(skips: Skips) -> WatchedLoader:
            return watch(loader, seed=seed, order=order, shards=shards, reserve=reserve, dataset=dataset, skips=skips)

        watched = self.follow(make)
        return loader if watched is None else watched

    def follow(self, make: Callable[[Skips], WatchedLoader]) -> WatchedLoader | None:
        """Take positions from a loader of a kind of its own. ``make`` builds it, given what plans skip; None where it raises."""
        try:
            watched = make(self._skips())
            if self._settings.exclude and "exclude" in watched.refused:
                self._notices.say("exclude", f"not left out: {watched.refused['exclude']}")
            self._loaders.append(watched)
            return watched
        except Exception as error:
            self._notices.fault("wrapping the loader", error)
            return None

    def resume(self) -> Target | None:
        """Return the checkpoint to load before training, None to begin from scratch. Call :meth:`resumed` afterwards."""
        try:
            return self._read_resume().target
        except Exception as error:
            self._notices.fault("choosing what to resume from", error)
            return None

    def resumed(self, step: int) -> None:
        """Say that the state after ``step`` is loaded (0: from scratch). Applies what the plan asks of the optimizers."""
        if self._started:
            return
        try:
            self._step = int(step)
            parts = self._live()
            if parts is None:
                self._started = True
                left_undone = self._read_resume().left_undone()
                if left_undone is not None:
                    self._notices.say("plan", f"trainwarden is off, and {left_undone}")
            else:
                self._start(parts, resumed=True)
        except Exception as error:
            self._notices.fault("resuming", error)

    def batch(self, input_ids: Any, labels: Any = None, attention_mask: Any = None, *, source: Any = None) -> None:
        """Hand in a micro-batch for the fingerprint, where the loader is not wrapped.

        ``input_ids`` are token ids, (…, tokens), or a whole batch as :func:`exporter.tokens.find_tokens` knows them. ``source``
        says where its samples are from: one name or number, or one a sample.
        """
        if self._live() is not None:
            given = {"input_ids": input_ids, "labels": labels, "attention_mask": attention_mask, "source": source}
            self._batches.append(given)

    def micro(self, loss: Tensor | float, tokens: Tensor | float | None = None) -> None:
        """Hand in the loss of a micro-batch, as it is before it is divided by their number; :meth:`step` then needs none.

        The step's loss is their mean; with ``tokens``, the number that the loss is a mean over, each weighs by it.
        """
        if self._live() is not None:
            try:
                with torch.no_grad():
                    self._micro.add(loss, tokens)
            except Exception as error:
                self._notices.fault("a micro-batch's loss", error)

    def step(self, loss: Tensor | float | None = None) -> None:
        """Close the step's record: call once per optimizer step, after ``optimizer.step()``. Reads no value.

        ``loss`` is the step's loss; of a tensor with several elements, the mean is taken. Without it, it is the mean of what
        :meth:`micro` was given.
        """
        parts = self._live()
        if parts is None:
            self._pass_unseen()
            return
        began = time.perf_counter()
        number = self._step + 1
        try:
            if not self._started:
                self._start(parts)
            with torch.no_grad():
                self._close(parts, self._micro.take(loss))
        except Exception as error:
            self._notices.fault("closing a step", error)
        finally:
            self._step = number
            if number >= parts.soft.armed:
                parts.soft.closed(number)
            parts.observer.seconds += time.perf_counter() - began
        if self._forensics is not None and number >= self._forensics.armed:
            self._forensics.take(number)

    def checkpoint(
        self, step: int, path: str | os.PathLike[str], *, future: Any = None, finite: bool | None = None
    ) -> None:
        """Report a checkpoint: the state after ``step`` at ``path``, complete now or when ``future`` is done.

        ``future`` is what an asynchronous save returned (``concurrent.futures.Future``, ``torch.futures.Future``, or the
        answer of ``torch.distributed.checkpoint.async_save``). Call it right after saving began: whether the parameters
        are finite is looked at now, on the device, unless ``finite`` says so.
        """
        parts = self._live()
        if parts is None:
            return
        try:
            if self._forensics is None or self._forensics.checkpoint(step, path):
                parts.reports.checkpoint(step, path, future, finite)
        except Exception as error:
            self._notices.fault("reporting a checkpoint", error)

    def forensics(self, save: Save, *, keep: int = 2, batches: int = 64) -> None:
        """Let a copy of the damaged state be asked for: opt-in, on every rank. See :mod:`exporter.forensics` for the arguments.

        Raises:
            TypeError, ValueError: an argument is of no use; the message names it.
        """
        checked(save, keep, batches)
        parts = self._live()
        if parts is None or self._forensics is not None:
            return
        try:
            beside = (self._optimizers, self._notices, lambda: self._step, self.phase)
            self._forensics = Forensics(save, keep, batches, parts, *beside)
            self._forensics.start()
        except Exception as error:
            self._notices.fault("forensics", error)

    def event(self, kind: str, **fields: Any) -> None:
        """Record that something happened: an evaluation, a change of stage or mixture, or a word of your own.

        Numbers, text, lists and dicts are recorded as they are; of a tensor with one element, its value.
        """
        parts = self._live()
        if parts is None:
            return
        try:
            parts.reports.event(kind, fields.pop("step", self._step), fields)
        except Exception as error:
            self._notices.fault("recording an event", error)

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Say what the process does inside the ``with``: ``evaluation``, ``checkpoint``, ``data``."""
        before = self._phase
        self._enter(name)
        try:
            yield
        finally:
            self._enter(before)

    def close(self, reason: str = "finished", code: int | None = 0) -> None:
        """End the record: everything is written, readers get up to 3 s to fetch it, the port is given back.

        Called at interpreter exit by itself. ``reason`` is ``finished``, ``signal`` or ``exception``.
        """
        self._end(reason, code)

    # How it works.

    def _live(self) -> Parts | None:
        """Return the parts while there is something to do: not when off, closed, or in a forked child."""
        return None if self._finished or self._pid != os.getpid() else self._parts

    def _read_resume(self) -> Resume:
        """Return what the run's folder says to this attempt. Reads alone; without parts nobody else says what is wrong."""
        if self._resume is None:
            roots = None if self._settings.roots is None else list(self._settings.roots)
            if self._parts is not None:
                self._resume = Resume.read(self._parts.folder, self._parts.identity.attempt, roots)
            else:
                self._resume = Resume.read(self._folder, next_attempt(self._folder, self._notices), roots)
                if self._resume.notices:
                    self._notices.say("resume", "; ".join(self._resume.notices))
        return self._resume

    def _skips(self) -> Skips:
        """Return what the data leaves out. A folder that cannot be read costs the skips, not the loader's positions."""
        try:
            return self._read_resume().skips.beside(self._settings.exclude)
        except Exception as error:
            self._notices.fault("reading what to skip", error)
            return Skips().beside(self._settings.exclude)

    def _pass_unseen(self) -> None:
        """Count a step that is not recorded, and let go of its batches."""
        self._started = True
        self._step += 1
        self._batches = []
        if self._resume is not None:
            self._resume.closed(self._step)  # a ramp goes on after close()
        for loader in self._loaders:
            try:
                loader.consumed()
            except Exception as error:
                self._notices.fault("letting go of a batch", error)

    def _start(self, parts: Parts, resumed: bool = False) -> None:
        """Apply the plan, and record the start event and what came before it."""
        self._started = True
        loader = self._loaders[-1] if self._loaders else None
        applied, target, notices = None, None, []
        try:
            resume = self._read_resume()
            parts.soft.rates, parts.observer.factor = resume.rates, resume.lr_factor
            if resumed:
                applied = self._look_as_planned(resume.apply(self._optimizers, self._step + 1, loader))
                target = resume.target
            elif resume.plan is not None:
                plan_id = resume.plan.plan_id
                self._notices.say(
                    "plan", f"plan {plan_id} is in force, but without exporter.resumed(step): not applied"
                )
            notices = resume.notices
        except Exception as error:
            self._notices.fault("carrying out the plan", error)
        fields = start_fields(
            parts.fields,
            step=self._step,
            loader=loader,
            target=target,
            applied=applied,
            clips=parts.observer.clips,
            notices=[*notices, *([] if loader is None else loader.notices), *self._notices.said],
        )
        if resumed:  # without, the first step's sheet is open already
            parts.observer.begin(self._step + 1)
        begun, rank = self._step, parts.identity.rank
        parts.drain.submit(
            Call(lambda: parts.recorder.begin(begun, lambda: list(parts.folder.journal_files(rank))[::-1]))
        )
        parts.reports.begin(fields, self._step)

    def _close(self, parts: Parts, loss: Tensor | float | None) -> None:
        observer, number = parts.observer, self._step + 1
        if self._phase == "init":
            self._show_phase("train")
        try:
            consumed, host = None, observer.sheet.host
            for loader in reversed(self._loaders):
                consumed = loader.consumed()
                if consumed is not None:
                    host["can_substitute"] = "substitute" in loader.can_skip
                    break
            batches = self._batches or ([] if consumed is None else consumed.batches)
            sheet = observer.close(loss, consumed, batches)
            staged = parts.staging.send(sheet)
            if staged is None:
                parts.drain.dropped += 1
                self._notices.say(
                    "values refused", "a step's values found no free slot: its record has host numbers only"
                )
            reading = Reading(step=number, due=sheet.due, host=sheet.host)
            parts.drain.submit(ClosedStep(reading, staged, time.time(), self._phase))
        finally:
            self._batches = []
            if self._resume is not None:
                self._resume.closed(number)
            observer.begin(number + 1)
            if self._looks is not None:
                self._look_on(number + 1)

    def _enter(self, name: str) -> None:
        if self._live() is not None and name != self._phase:
            self._show_phase(str(name))
            self.event("phase", phase=self._phase)

    def _show_phase(self, name: str) -> None:
        self._phase = name
        parts = self._parts
        if parts is not None:
            parts.observer.phase = name
            parts.drain.submit(Call(lambda: parts.page.phase(name)))

    def _end(self, reason: str, code: int | None) -> None:
        parts = self._live()
        if parts is None:
            return
        try:
            if self._forensics is not None:
                self._forensics.finish(DRAIN_SECONDS)
            self._show_phase("exit")
            if self._looks is not None:
                self._looks.end(self._step)
            parts.reports.end(reason, code, self._step)
            self._finished = True
            parts.observer.detach()
            parts.hardware.end()
            if not parts.drain.finish(DRAIN_SECONDS):
                self._notices.say("drain", "closed before everything was recorded")
            if parts.side is not None:
                parts.side.leave()
            parts.serving.stop(self._settings.reader_seconds)
            if self._ending is not None:
                self._ending.forget()
        except Exception as error:
            self._notices.fault("closing the exporter", error)
        finally:
            self._finished = True

    def _abandon(self) -> None:
        """In a forked child: do nothing any more; everything belongs to the parent."""
        self._finished = True
        if self._parts is not None:
            self._parts.observer.active = False


_alive: weakref.WeakSet[Exporter] = weakref.WeakSet()


def _in_child() -> None:
    for exporter in list(_alive):
        exporter._abandon()


os.register_at_fork(after_in_child=_in_child)
