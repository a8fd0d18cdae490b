"""Hugging Face's Trainer: a callback that closes one record per optimizer step, out of what the trainer computed itself.

The loss is the sum of what ``training_step`` returns, which is what the trainer logs for one step: token-weighted under
gradient accumulation where the trainer weights by tokens. It is taken before ``logging_nan_inf_filter``, which puts an average in the
place of a NaN in the log. The order of the data stays the trainer's own; only rows that a plan skips are replaced.

Nothing here raises into the trainer or reads a value from a device.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import torch
from accelerate.optimizer import AcceleratedOptimizer
from torch import Tensor, nn
from transformers import Trainer
from transformers.trainer_callback import TrainerCallback
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR

from trainwarden.exporter.callbacks import checkpoint_to_resume, quietly
from trainwarden.exporter.exporter import Exporter
from trainwarden.exporter.loader.prepared import PreparedLoader
from trainwarden.exporter.notices import Notices
from trainwarden.exporter.settings import Settings

#: How many callers up the trainer is looked for: its callback handler has two functions in between.
_CALLERS = 8

_quietly = quietly("Trainer")


if TYPE_CHECKING:

    class _Callback:
        """Stands for transformers' class, whose types are not asked for."""

else:
    _Callback = TrainerCallback


class TrainwardenCallback(_Callback):
    """Watches what ``Trainer.train`` trains.

    Example::

        warden = TrainwardenCallback(run="gpt-7b")
        trainer = Trainer(model, args, train_dataset=rows, callbacks=[warden])
        trainer.train(resume_from_checkpoint=warden.checkpoint())  # None in a run that begins

    Args:
        run: the run's display name; it names its folder. Default ``$TRAINWARDEN_RUN``, else ``run``.
        dataset, shards: the data set's name and ``(name, first_row, end_row)`` of each shard, by which a plan excludes data.
        reserve: share of the rows from which stand-ins for skipped ones are drawn; they are trained on as ever, too.
        forensics: let a copy of the damaged state be asked for; it is what the trainer puts into a checkpoint.
        settings: what else :class:`Exporter` takes (``dir``, ``host``, ``port``, ``roots``, ``cadence`` …).

    Attributes:
        exporter: the exporter of the training that is going on, else None.

    Raises:
        TypeError, ValueError: an argument is of no use; the message names it.
    """

    def __init__(
        self,
        run: str | None = None,
        *,
        dataset: str | None = None,
        shards: Sequence[Any] | None = None,
        reserve: float = 0.01,
        forensics: bool = False,
        **settings: Any,
    ) -> None:
        super().__init__()
        own = {name: value for name, value in settings.items() if name not in ("dir", "roots", "scaler")}
        Settings(run=run or "run", **own)  # what is wrong is said now, not in the middle of a training
        self._run = run
        self._data: dict[str, Any] = {"dataset": dataset, "shards": shards, "reserve": reserve}
        self._settings = settings
        self._forensics = forensics
        self._forget()

    def _forget(self) -> None:
        self.exporter: Exporter | None = None
        self._notices = Notices()
        self._past: list[str] = []
        self._loader: PreparedLoader | None = None
        self._is_first_epoch = self._is_first_batch = True
        self._loss: Tensor | None = None
        self._phases = ExitStack()
        self._undo: Callable[[], None] | None = None
        self._saving: Future[None] | None = None
        self._saved: dict[str, int] = {}

    def __getstate__(self) -> dict[str, Any]:
        """Return what a copy in another process needs: how to watch, not what is being watched."""
        return {
            "_run": self._run,
            "_data": self._data,
            "_settings": self._settings,
            "_forensics": self._forensics,
        }

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._forget()

    def checkpoint(self) -> str | None:
        """Return what to resume from: the checkpoint that a plan names, else the newest whole one, else None (a new run).

        For ``trainer.train(resume_from_checkpoint=…)``. Reads the run's folder and touches nothing.
        """
        return checkpoint_to_resume(self._run, self._settings, self._notices)

    @property
    def notices(self) -> list[str]:
        """What went wrong or was done without so far, one sentence each."""
        return [*self._past, *self._notices.said, *([] if self.exporter is None else self.exporter.notices)]

    # The moments of a training, in their order.

    @_quietly
    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Attach: model and optimizer are wrapped and restored, and nothing has run or was compiled yet."""
        self._end("exception", 1)  # of a training that broke off, or begins again with smaller batches
        trainer = _caller(self)
        optimizer = kwargs["optimizer"]
        while isinstance(optimizer, AcceleratedOptimizer):
            optimizer = optimizer.optimizer
        model = kwargs["model"] if trainer is None else _uncompiled(trainer.model_wrapped)
        scaler = None if trainer is None else trainer.accelerator.scaler
        settings = {"total_steps": state.max_steps, "scaler": scaler, **self._settings}
        exporter = self.exporter = Exporter(model, optimizer, self._run, **settings)
        loader = kwargs["train_dataloader"]
        followed = exporter.follow(lambda skips: PreparedLoader(loader, skips=skips, **self._data))
        self._loader = cast("PreparedLoader | None", followed)
        self._is_first_epoch = self._is_first_batch = True
        if trainer is None:
            self._notices.say(
                "trainer", "the trainer was not found: neither losses nor batches are seen, only what optimizers do"
            )
        elif exporter.start_id is not None:
            self._listen(trainer)
            if self._forensics:
                exporter.forensics(lambda folder: _save_apart(trainer, folder))
        if self._loader is not None:
            self._loader.begin(*_where(self._loader, args, state))
            seed = args.seed if args.data_seed is None else args.data_seed
            if self._loader.order_seed not in (None, seed):
                self._loader.notices.append(
                    f"loader: its order comes from seed {self._loader.order_seed}, the global one when training began, not from "
                    f"{seed} of the arguments: without data_seed= a resumed run may read other data"
                )
        exporter.resumed(state.global_step)
        if args.eval_on_start:
            self._phases.enter_context(exporter.phase("evaluation"))

    def _listen(self, trainer: Any) -> None:
        """See every micro-batch and its loss on their way through this one trainer."""
        mine = functools.partial(self._training_step, trainer.training_step)

        def undo() -> None:
            if vars(trainer).get("training_step") is mine:
                del trainer.training_step

        trainer.training_step = mine
        self._undo = undo

    def _training_step(self, original: Callable[..., Any], model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        loss = original(model, inputs, *args, **kwargs)
        self._micro_step(inputs, loss)
        return loss

    @_quietly
    def _micro_step(self, inputs: Any, loss: Any) -> None:
        if self._loader is not None:
            misread = self._loader.misread if self._is_first_batch else None
            if misread is not None:
                self._notices.say("misread", misread)
            self._is_first_batch = False
            self._loader.hand_out(inputs)
        if isinstance(loss, Tensor):
            seen = loss.detach()
            seen = seen.to(torch.promote_types(seen.dtype, torch.float32)).mean()
            self._loss = seen.clone() if self._loss is None else self._loss + seen

    @_quietly
    def on_epoch_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Tell the loader of a new epoch. The first one it knows already, from :meth:`on_train_begin`."""
        if self._loader is not None and not self._is_first_epoch:
            self._loader.begin(self._loader.epoch + 1, 0)
        self._is_first_epoch = False

    @_quietly
    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Training goes on."""
        self._phases.close()
        self._loss = None

    @_quietly
    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Close the step's record, then say what the trainer does next."""
        if self.exporter is None:
            return
        loss, self._loss = self._loss, None
        self.exporter.step(loss)
        self._all_saved()
        self._next(control)

    @_quietly
    def on_epoch_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Say what the trainer does next."""
        self._next(control)

    def _next(self, control: Any) -> None:
        """Enter the phase that the trainer is about to. It has no event for the beginning of one.

        Where the plan of this attempt wants no evaluation, the trainer is not about to make one.
        """
        if self.exporter is not None and control.should_evaluate and self.exporter.without_evaluation:
            control.should_evaluate = False
        if self.exporter is not None and (control.should_evaluate or control.should_save):
            self._phases.close()
            name = "evaluation" if control.should_evaluate else "checkpoint"
            self._phases.enter_context(self.exporter.phase(name))

    @_quietly
    def on_evaluate(self, args: Any, state: Any, control: Any, metrics: Any = None, **kwargs: Any) -> None:
        """Evaluation is over; what it found is an event."""
        if self.exporter is None:
            return
        self._phases.close()
        found = {name: value for name, value in (metrics or {}).items() if isinstance(value, int | float)}
        self.exporter.event("evaluation", **{**found, "step": state.global_step})
        self._next(control)

    @_quietly
    def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Report the checkpoint that this rank has written, as complete once the other ranks have, too."""
        if self.exporter is None:
            return
        self._phases.close()
        path = Path(args.output_dir) / f"{PREFIX_CHECKPOINT_DIR}-{state.global_step}"
        if args.save_only_model:
            self._notices.say(
                "model alone", "save_only_model=True: checkpoints are not reported, because no run can go on from them"
            )
        elif args.should_save and not (path / "trainer_state.json").is_file():
            self._notices.say("no checkpoint", f"no checkpoint at {path}: it is not reported")
        else:
            self._all_saved()
            self._saving = Future() if args.world_size > 1 else None
            self.exporter.checkpoint(state.global_step, path, future=self._saving)
            self._saved[str(path.absolute())] = state.global_step
        if args.should_save:
            self._removed()

    def _removed(self) -> None:
        """Report checkpoints that the trainer has deleted since (``save_total_limit``)."""
        for path in [path for path in self._saved if not Path(path).exists()]:
            step = self._saved.pop(path)
            if self.exporter is not None:
                self.exporter.event("checkpoint", path=path, deleted=True, step=step)

    def _all_saved(self) -> None:
        """All ranks have come here since the last save: they reduced a gradient together."""
        saving, self._saving = self._saving, None
        if saving is not None:
            saving.set_result(None)

    @_quietly
    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """End the record. The next ``train()`` of this trainer is a start of its own."""
        if args.should_save:
            self._removed()
        self._end("finished", 0)

    def _end(self, reason: str, code: int | None) -> None:
        """Close the record, if one is open, and leave the trainer as it was."""
        self._all_saved()
        self._phases.close()
        if self._undo is not None:
            self._undo()
        if self.exporter is not None:
            self.exporter.close(reason, code)
            self._past += self.exporter.notices
        self.exporter, self._loader, self._loss, self._undo, self._saved = None, None, None, None, {}


def _save_apart(trainer: Any, folder: Path) -> None:
    """Save what the trainer puts into a checkpoint, elsewhere: it neither counts nor removes what lies there."""
    where = str(folder)
    trainer.save_model(where, _internal_call=True)
    trainer._save_optimizer_and_scheduler(where)
    trainer._save_scaler(where)
    trainer._save_rng_state(where)
    if trainer.args.should_save:
        trainer.state.save_to_json(str(folder / "trainer_state.json"))


def _caller(callback: TrainwardenCallback) -> Any:
    """Return the trainer that is calling, or None. It hands its callbacks model, optimizer and loader, but not itself."""
    frame = sys._getframe(1)
    for _ in range(_CALLERS):
        if frame is None or frame.f_back is None:
            return None
        frame = frame.f_back
        owner = frame.f_locals.get("self")
        if isinstance(owner, Trainer) and any(one is callback for one in owner.callback_handler.callbacks):
            return owner
    return None


def _where(loader: PreparedLoader, args: Any, state: Any) -> tuple[int, int]:
    """Return epoch, and batches of it that are left out, at which the trainer goes on, the way it finds that out itself."""
    try:
        batches = len(loader)
    except (TypeError, NotImplementedError):  # a stream without a length is one epoch
        return 0, 0 if args.ignore_data_skip else state.global_step * args.gradient_accumulation_steps
    epoch, steps = divmod(state.global_step, max(-(-batches // args.gradient_accumulation_steps), 1))
    return epoch, 0 if args.ignore_data_skip else steps * args.gradient_accumulation_steps


def _uncompiled(model: nn.Module) -> nn.Module:
    """Return the module inside of what ``torch.compile`` made of it."""
    while type(model).__name__ == "OptimizedModule":
        model = cast(nn.Module, model._orig_mod)
    return model
