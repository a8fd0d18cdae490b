"""torchtitan, and trainers built like it: ``attach(trainer)`` between making the trainer and ``trainer.train()``.

Written against the interface that torchtitan's Trainer has shown since 0.2: ``model_parts``, ``optimizers`` (a container that is an
Optimizer and holds several), ``train_step(data_iterator)``, ``forward_backward_step(...)``, ``step``; and, where they are there,
``checkpointer``, ``dataloader``, ``validator``, ``parallel_dims``, ``train`` and ``close``. Methods of this one trainer are listened in on;
its clipping goes through ``torch.nn.utils`` and is seen by the exporter's own hooks, over all parts of a pipeline and groups of experts.
No fault of this file reaches the trainer; only :func:`attach` itself raises, on an object that is no such trainer.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict_saver import save as save_distributed

from trainwarden.exporter.exporter import Exporter
from trainwarden.exporter.hooks.replaced import go_through
from trainwarden.exporter.loader import Skips, WatchedLoader
from trainwarden.exporter.loader.plain import PlainLoader
from trainwarden.exporter.loader.stateful import StatefulLoader
from trainwarden.exporter.loader.streams import ranks
from trainwarden.exporter.sinks.journal import position_at

#: What the adapter cannot do without, and what it is.
NEEDED = {
    "model_parts": "the modules that this rank trains, a list (several under pipeline parallelism)",
    "optimizers": "an OptimizersContainer, or a list of optimizers",
    "train_step": "a method that makes one optimizer step",
    "forward_backward_step": "a method that returns the loss of one micro-batch",
    "step": "the number of the step that is made, an int",
}
#: What is gone without where it is absent.
WANTED = {
    "checkpointer": "checkpoints are not reported, and a plan's target is not loaded",
    "dataloader": "there are no sample positions, and data cannot be skipped",
}


def attach(
    trainer: Any, run: str | None = None, *, dataset: str | None = None, forensics: bool = False, **settings: Any
) -> Exporter:
    """Watch a trainer of torchtitan's kind, until its ``close()``.

    Example::

        trainer = config.build()                  # torchtitan's Trainer
        exporter = attach(trainer, run="llama3-8b")
        try:
            trainer.train()                       # loads what the plan says, else the newest checkpoint
        finally:
            trainer.close()                       # ends the record, too

    Args:
        trainer: the trainer, made and not yet training.
        run: the run's display name; it names its folder.
        dataset: the data set's name.
        forensics: let a copy of the damaged state be asked for; all ranks save it with ``torch.distributed.checkpoint``.
        settings: what else :class:`Exporter` takes.

    Raises:
        TypeError: the trainer lacks something that is needed; the message names all of it. Or a wrong argument.
        ValueError: an argument is of no use.
    """
    absent = [f"{name} ({what})" for name, what in NEEDED.items() if not hasattr(trainer, name)]
    if absent:
        raise TypeError(f"trainer: {type(trainer).__name__} lacks {'; '.join(absent)}")
    parts = trainer.model_parts
    parts = [parts] if isinstance(parts, nn.Module) else list(parts)
    optimizers = _flat(trainer.optimizers)
    exporter = Exporter(parts[0] if len(parts) == 1 else nn.ModuleList(parts), optimizers, run, **settings)
    _Attached(trainer, exporter, dataset)
    if forensics:
        exporter.forensics(lambda folder: _save_apart(trainer, parts, folder))
    return exporter


def _save_apart(trainer: Any, parts: list[nn.Module], folder: Path) -> None:
    """Save what the trainer's checkpointer would, elsewhere: it neither counts nor removes what lies there."""
    states = getattr(getattr(trainer, "checkpointer", None), "states", None) or {}
    states = {name: state for name, state in states.items() if name != "model"}
    models = {f"model_part_{number}": part.state_dict() for number, part in enumerate(parts)}
    save_distributed({**states, **models}, checkpoint_id=str(folder))


def _flat(optimizers: Any) -> list[Any]:
    """Return the optimizers that make the steps: a container is one itself, but makes none."""
    if isinstance(optimizers, Iterable):
        return [one for each in optimizers for one in _flat(each)]
    return [optimizers]


class _Attached:
    """What listens in on one trainer."""

    def __init__(self, trainer: Any, exporter: Exporter, dataset: str | None) -> None:
        self._trainer = trainer
        self._exporter = exporter
        self._notices = exporter._notices
        self._losses: list[Tensor] = []
        self._begun = False
        self._loader: Any = None
        self._saved: Any = None
        self._reason: tuple[str, int | None] = ("finished", 0)
        self._undo: list[Callable[[], None]] = []
        for name, means in WANTED.items():
            if getattr(trainer, name, None) is None:
                self._notices.say(name, f"{type(trainer).__name__} has no {name}: {means}")
        self._listen(trainer, "forward_backward_step", self._micro_step)
        self._listen(trainer, "train_step", self._step)
        self._listen(trainer, "train", self._train)
        self._listen(trainer, "close", self._close)
        self._listen(getattr(trainer, "validator", None), "validate", self._validate)
        checkpointer = getattr(trainer, "checkpointer", None)
        self._listen(checkpointer, "load", self._load)
        self._listen(checkpointer, "save", self._save)
        self._quietly("wrapping the loader", self._wrap, dataset)

    def _listen(self, owner: Any, name: str, around: Callable[..., Any]) -> None:
        """Have a method of this one object go through ``around``, if it has it."""
        if callable(getattr(owner, name, None)):
            self._undo.append(go_through(owner, name, around))

    def _quietly(self, what: str, function: Callable[..., Any], *args: Any) -> Any:
        """Let no fault of ours reach the trainer."""
        try:
            return function(*args)
        except Exception as error:
            self._notices.fault(f"torchtitan: {what}", error)
            return None

    # Data.

    def _wrap(self, dataset: str | None) -> None:
        """Let the trainer draw from a loader that counts; the checkpointer keeps the inner one, and its state."""
        loader = getattr(self._trainer, "dataloader", None)
        if loader is None:
            return
        rank, world = _share(self._trainer)

        def make(skips: Skips) -> WatchedLoader:
            if callable(getattr(loader, "state_dict", None)):
                return StatefulLoader(loader, dataset=dataset, skips=skips, rank=rank, world=world)
            why = "it has no state_dict"
            return PlainLoader(loader, why=why, dataset=dataset, skips=skips, rank=rank, world=world)

        watched = self._exporter.follow(make)
        if watched is not None:
            self._loader = watched
            self._trainer.dataloader = watched
            self._undo.append(lambda: setattr(self._trainer, "dataloader", loader))

    def _place(self, step: int) -> None:
        """Number on after ``step`` steps, where the record of that step left off.

        Without that record: a stream has one endless epoch here, and each step the share of it that these ranks read. That is what was
        read only where there were as many ranks before.
        """
        if self._loader is None or step == 0:
            return
        known = position_at(list(self._exporter._folder.journal_files(rank=0))[::-1], step)
        if known is not None:
            self._loader.place(*known)
            return
        size = self._loader.batch_size
        if size is None:
            self._notices.say("positions", "the loader has no batch_size: sample positions count from 0 at this resume")
            return
        trainer = self._trainer
        groups = int(getattr(trainer, "gradient_accumulation_steps", 1))
        for name in ("num_pp_microbatches", "num_pipeline_parallel_microbatches"):
            groups *= int(getattr(trainer, name, 1))
        batches, loader = step * groups, self._loader
        is_stateful = isinstance(loader, StatefulLoader)
        loader.place(0, loader.position_after(batches) if is_stateful else batches * size * _share(trainer)[1])

    # Steps.

    def _micro_step(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        loss = original(*args, **kwargs)
        self._quietly("a micro-batch's loss", self._keep, loss, "global_valid_tokens" in kwargs)
        return loss

    def _keep(self, loss: Any, is_share: bool) -> None:
        """Keep a loss. ``is_share``: it is this rank's sum over the tokens of all ranks, and the mean is so many times it."""
        if not isinstance(loss, Tensor) or not _owns_loss(self._trainer):
            return
        with torch.no_grad():
            own = loss.detach()
            own = own.to(torch.promote_types(own.dtype, torch.float32)).sum()
            # A graph that is replayed writes into the same tensor again.
            self._losses.append(own * _sharers(self._trainer) if is_share else own.clone())

    def _step(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        self._quietly("going on", self._begin)
        self._losses = []
        try:
            answer = original(*args, **kwargs)
        except Exception as error:
            if self._losses and not type(error).__name__.startswith("Dataloader"):  # out of data: no step was made
                self._quietly("the step that failed", self._record)
            raise
        self._quietly("closing a step", self._record)
        return answer

    def _begin(self) -> None:
        """Before the first step: the checkpoint is loaded by now, and the trainer has counted one on."""
        if not self._begun:
            self._begun = True
            step = int(self._trainer.step) - 1
            self._quietly("placing the loader", self._place, step)
            self._exporter.resumed(step)

    def _record(self) -> None:
        losses, self._losses = self._losses, []
        self._exporter.step(torch.stack(losses).sum() if losses else None)

    # Around them.

    def _train(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        try:
            answer = original(*args, **kwargs)
        except BaseException as error:
            self._reason = ("signal", 130) if isinstance(error, KeyboardInterrupt) else ("exception", 1)
            if not callable(getattr(self._trainer, "close", None)):
                self._end()
            raise
        if not callable(getattr(self._trainer, "close", None)):
            self._end()
        return answer

    def _close(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        try:
            return original(*args, **kwargs)  # waits for what is still being saved
        finally:
            self._end()

    def _end(self) -> None:
        undo, self._undo = self._undo, []
        for one in undo:
            self._quietly("letting go of the trainer", one)
        self._exporter.close(*self._reason)

    def _validate(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        with self._exporter.phase("evaluation"):
            return original(*args, **kwargs)

    def _load(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Load what the plan says in place of the newest: what was given up lies in the same folder, with a higher step."""
        given = args[0] if args else kwargs.get("step", -1)
        if given == -1:
            step = self._quietly("choosing what to load", self._target_step)
            if step is not None:
                return original(step=step)
        return original(*args, **kwargs)

    def _target_step(self) -> int | None:
        target = self._exporter.resume()
        if target is None:
            return None
        here = self._path(target.step)
        if here is None or Path(target.path).absolute() != Path(here).absolute():
            self._notices.say("target", f"{target.path} is none of the trainer's own checkpoints: it loads its newest")
            return None
        return target.step

    def _save(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        if not self._quietly("looking whether it saves", self._will_save, original, args, kwargs):
            answer = original(*args, **kwargs)  # called at every step
        else:
            with self._exporter.phase("checkpoint"):
                answer = original(*args, **kwargs)
        self._quietly("reporting a checkpoint", self._report, original, answer, args, kwargs)
        return answer

    def _will_save(self, original: Callable[..., Any], args: Any, kwargs: Any) -> bool:
        asked = getattr(self._trainer.checkpointer, "_should_save", None)
        return bool(asked(*_save_of(original, args, kwargs))) if callable(asked) else False

    def _report(self, original: Callable[..., Any], answer: Any, args: Any, kwargs: Any) -> None:
        step, is_last = _save_of(original, args, kwargs)
        checkpointer = self._trainer.checkpointer
        future = getattr(checkpointer, "save_future", getattr(checkpointer, "async_future", None))
        is_new, self._saved = future is not None and future is not self._saved, future
        path = self._path(step)
        if answer is False or path is None:
            return
        if answer is None and not is_new and not ("://" not in path and Path(path).is_dir()):
            return  # from before save() said whether it did
        if is_last and getattr(checkpointer, "last_save_model_only", False):
            self._notices.say(
                "model alone", "the last save holds the model alone: it is not reported, no run goes on from it"
            )
            return
        self._exporter.checkpoint(step, path, future=future if is_new else None)

    def _path(self, step: int) -> str | None:
        checkpointer = self._trainer.checkpointer
        made = getattr(checkpointer, "_create_checkpoint_id", None)
        if callable(made):
            return str(made(step))
        folder = getattr(checkpointer, "folder", None)
        return None if folder is None else str(Path(folder) / f"step-{step}")


def _save_of(original: Callable[..., Any], args: Any, kwargs: Any) -> tuple[int, bool]:
    """Return step and whether it is the last, of a call of ``checkpointer.save``."""
    given = inspect.signature(original).bind(*args, **kwargs)
    given.apply_defaults()
    return int(given.args[0]), bool(given.arguments.get("last_step", False))


def _share(trainer: Any) -> tuple[int, int]:
    """Return this rank's place among those that read different data, and how many they are."""
    dims = getattr(trainer, "parallel_dims", None)
    if dims is None:
        return ranks()
    if hasattr(dims, "get_optional_mesh"):
        mesh = dims.get_optional_mesh("batch")
    else:  # torchtitan 0.2.0
        mesh = dims.world_mesh["dp"] if dims.dp_enabled else None
    return (0, 1) if mesh is None else (mesh.get_local_rank(), mesh.size())


def _sharers(trainer: Any) -> int:
    """Return over how many ranks' tokens a loss is divided."""
    dims = getattr(trainer, "parallel_dims", None)
    mesh = None if dims is None else dims.get_optional_mesh("loss")
    if mesh is not None:
        return int(mesh.size())
    return ranks()[1] if dims is None else 1


def _owns_loss(trainer: Any) -> bool:
    """Say whether this rank has the loss: of a pipeline, the last stage alone."""
    dims = getattr(trainer, "parallel_dims", None)
    return dims is None or not dims.pp_enabled or bool(trainer.pp_has_last_stage)
