"""Lightning's Trainer: a callback that makes the exporter, closes a record per optimizer step, and knows where to resume.

Works with ``lightning.pytorch`` and ``pytorch_lightning``, whichever is installed. Lightning passes the training step to the
optimizer as a closure, so gradients are made and clipped inside ``optimizer.step``; the exporter's hooks look at them there. What
this file adds is what only the trainer knows: which batch ended an optimizer step, the loss, checkpoints, phases, where a run goes on.
Nothing here raises into the trainer, and without ``wrap`` nothing here changes what it computes.
"""

from __future__ import annotations

import functools
import logging
import sys
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future
from contextlib import ExitStack
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor, nn

from trainwarden.exporter.callbacks import checkpoint_to_resume, quietly
from trainwarden.exporter.exporter import Exporter
from trainwarden.exporter.loader import WatchedLoader, watch
from trainwarden.exporter.loader.ahead import DrawnAhead
from trainwarden.exporter.notices import Notices
from trainwarden.exporter.settings import Settings

log = logging.getLogger("trainwarden.exporter")

#: Where Lightning's Callback may come from.
PACKAGES = ("lightning.pytorch", "pytorch_lightning")


def _base() -> type[Any]:
    """Return Lightning's Callback, or a class that is one for both packages where both are loaded.

    Raises:
        ImportError: neither is installed.
    """
    names = [name for name in PACKAGES if name in sys.modules]
    if not names:
        names = [name for name in PACKAGES if find_spec(name.partition(".")[0]) is not None][:1]
    if not names:
        raise ImportError("the Lightning adapter needs Lightning: pip install lightning")
    found = tuple(dict.fromkeys(import_module(f"{name}.callbacks").Callback for name in names))
    return found[0] if len(found) == 1 else type("Callback", found, {})


_quietly = quietly("Lightning")


if TYPE_CHECKING:

    class _Callback:
        """Stands for Lightning's class, whose types are not asked for."""

else:
    _Callback = _base()


class TrainwardenCallback(_Callback):
    """Watches what ``Trainer.fit`` trains.

    Example::

        warden = TrainwardenCallback(run="gpt-7b", wrap={"seed": 0, "dataset": "web"})
        trainer = Trainer(callbacks=[warden], ...)
        trainer.fit(module, ckpt_path=warden.checkpoint())  # None in a run that begins

    A record is one optimizer step; under manual optimization, one batch in which an optimizer stepped, with the updates of all its
    optimizers. Its loss is the mean over the step's micro-batches. In a ``fast_dev_run`` nothing is watched.

    Args:
        run: the run's display name; it names its folder.
        wrap: True, or the arguments of :meth:`Exporter.wrap`: take over the order of the train loader, so that positions are
            known, a restart is exact, and a plan can skip data. False leaves the loader alone.
        forensics: let a copy of the damaged state be asked for; it is what ``Trainer.save_checkpoint`` saves.
        settings: what else :class:`Exporter` takes (``dir``, ``host``, ``port``, ``roots``, ``cadence`` …).

    Attributes:
        exporter: the exporter of the fit that is going on, else None.

    Raises:
        TypeError, ValueError: an argument is of no use; the message names it.
    """

    def __init__(
        self,
        run: str | None = None,
        *,
        wrap: bool | Mapping[str, Any] = False,
        forensics: bool = False,
        **settings: Any,
    ) -> None:
        super().__init__()
        if not isinstance(wrap, bool | Mapping):
            raise TypeError(f"wrap: {wrap!r} is neither True nor a mapping of arguments of Exporter.wrap")
        own = {name: value for name, value in settings.items() if name not in ("dir", "roots")}
        Settings(run=run or "run", **own)  # what is wrong is said now, not in the middle of a fit
        self._run = run
        self._settings = settings
        self._forensics = forensics
        self._wrap: dict[str, Any] | None = (dict(wrap) if isinstance(wrap, Mapping) else {}) if wrap else None
        self._forget()

    def _forget(self) -> None:
        self.exporter: Exporter | None = None
        self._notices = Notices()
        self._past: list[str] = []
        self._trainer: Any = None
        self._loader: _LateLoader | None = None
        self._reason: tuple[str, int | None] = ("finished", 0)
        self._phases = ExitStack()
        self._undo: list[Callable[[], None]] = []
        self._paths: dict[str, int] = {}
        #: The trainer's own count of steps when a record was last closed, and the number of that record.
        self._seen = (0, 0)
        self._loader_state: dict[str, Any] | None = None

    def __getstate__(self) -> dict[str, Any]:
        """Return what a copy in another process needs: how to watch, not what is being watched."""
        return {
            "_run": self._run,
            "_settings": self._settings,
            "_wrap": self._wrap,
            "_forensics": self._forensics,
        }

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._forget()

    @property
    def notices(self) -> list[str]:
        """What went wrong or was done without so far, one sentence each."""
        return [*self._past, *self._notices.said, *([] if self.exporter is None else self.exporter.notices)]

    # Where a run goes on.

    def checkpoint(self) -> str | None:
        """Return the path to give to ``fit`` as ``ckpt_path``: what the plan names, else the newest that is whole, else None."""
        return checkpoint_to_resume(self._run, self._settings, self._notices)

    def state_dict(self) -> dict[str, Any]:
        """Return what a checkpoint keeps of the record: its number, and the position of a wrapped loader."""
        try:
            global_step, step = self._state_step()
            loader = self._loader.watched.state_dict() if self._loader is not None else self._loader_state
            if loader is not None:
                loader = {name: value for name, value in loader.items() if name != "inner"}  # Lightning keeps that one
            return {"global_step": global_step, "step": step, "loader": loader}
        except Exception as error:
            self._notices.fault("saving the state", error)
            return {}

    @_quietly
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take over what :meth:`state_dict` returned; it is used when training begins."""
        self._seen = (int(state_dict["global_step"]), int(state_dict["step"]))
        self._loader_state = state_dict.get("loader")

    # The moments of a fit, in their order.

    @_quietly
    def on_fit_start(self, trainer: Any, pl_module: Any) -> None:
        """Attach: optimizers are made and the strategy is set up; nothing has run or was compiled yet."""
        self._finish()
        if trainer.fast_dev_run:
            log.info("trainwarden: nothing is watched in a fast_dev_run")
            return
        self._trainer = trainer
        self._reason = ("finished", 0)
        model = trainer.model if isinstance(trainer.model, nn.Module) else pl_module
        scaler = getattr(trainer.precision_plugin, "scaler", None)
        self.exporter = Exporter(model, list(trainer.optimizers), self._run, scaler=scaler, **self._settings)
        self._listen(trainer, "save_checkpoint", self._saving)
        self._listen(trainer.strategy, "remove_checkpoint", self._removing)
        self._listen(trainer.strategy, "teardown", self._tearing_down)
        if self._wrap is not None:
            self._listen(trainer.strategy, "process_dataloader", self._processing)
        if self._forensics:
            self.exporter.forensics(lambda folder: _save_apart(trainer, folder))

    @_quietly
    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        """Say at which step training goes on; optimizers and counters are restored by now."""
        if self.exporter is None:
            return
        at = int(trainer.global_step)
        if at == self._seen[0]:
            step = self._seen[1]
        elif pl_module.automatic_optimization:
            step = at
        else:  # saved without this callback: what Lightning's loggers count is batches, not steps of each optimizer
            step = int(trainer.fit_loop.epoch_loop._batches_that_stepped)
        self._seen = (at, step)
        self.exporter.resumed(step)

    @_quietly
    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        """Show the batch, where no loader does."""
        if self.exporter is not None and self._loader is None:
            self.exporter.batch(batch)

    @_quietly
    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        """Close the record, if this batch ended an optimizer step."""
        if self.exporter is None:
            return
        loss = outputs.get("loss") if isinstance(outputs, Mapping) else outputs
        if isinstance(loss, Tensor):
            loss = loss.detach().to(torch.promote_types(loss.dtype, torch.float32))
            # Lightning has divided it by the micro-batches of a whole step.
            self.exporter.micro(loss * trainer.accumulate_grad_batches if pl_module.automatic_optimization else loss)
        at = int(trainer.global_step)
        if at <= self._seen[0]:
            return
        if self._loader is not None:
            self._loader.counted.ahead = len(getattr(trainer.fit_loop._data_fetcher, "batches", ()))
        self.exporter.step()
        self._seen = (at, self._seen[1] + 1)

    @_quietly
    def on_validation_start(self, trainer: Any, pl_module: Any) -> None:
        """Evaluation begins, that of the sanity check too."""
        if self.exporter is not None:
            self._phases.enter_context(self.exporter.phase("evaluation"))

    @_quietly
    def on_validation_end(self, trainer: Any, pl_module: Any) -> None:
        """Evaluation is over."""
        self._phases.close()

    @_quietly
    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
        """Keep the reason. Other callbacks may still save; the trainer's teardown ends the record."""
        if isinstance(exception, KeyboardInterrupt):
            self._reason = ("signal", 130)
        elif type(exception).__name__ == "SIGTERMException":
            self._reason = ("signal", 143)
        else:
            self._reason = ("exception", 1)

    @_quietly
    def on_fit_end(self, trainer: Any, pl_module: Any) -> None:
        """End the record, where the strategy's teardown did not."""
        self._finish()

    # What the trainer does between its callbacks.

    def _listen(self, owner: Any, name: str, around: Callable[..., Any]) -> None:
        """Have a method of this one object go through ``around``, until the record ends."""
        original = getattr(owner, name)
        mine = functools.partial(around, original)
        setattr(owner, name, mine)

        def undo() -> None:
            if vars(owner).get(name) is mine:
                delattr(owner, name)

        self._undo.append(undo)

    def _saving(self, original: Callable[..., Any], filepath: Any, *args: Any, **kwargs: Any) -> Any:
        exporter = self.exporter
        if exporter is None:
            return original(filepath, *args, **kwargs)
        with exporter.phase("checkpoint"):
            answer = original(filepath, *args, **kwargs)
        self._saved(exporter, filepath, bool(kwargs.get("weights_only", args[0] if args else False)))
        return answer

    @_quietly
    def _saved(self, exporter: Exporter, filepath: Any, weights_only: bool) -> None:
        if weights_only:
            self._notices.say(
                "weights alone", "a checkpoint of the weights alone is not reported: no run goes on from it"
            )
            return
        step = self._state_step()[1]
        self._paths[str(filepath)] = step
        exporter.checkpoint(step, filepath, future=_pending_save(self._trainer.strategy.checkpoint_io))

    def _removing(self, original: Callable[..., Any], filepath: Any) -> Any:
        answer = original(filepath)
        self._removed(filepath)
        return answer

    @_quietly
    def _removed(self, filepath: Any) -> None:
        step = self._paths.pop(str(filepath), None)
        if self.exporter is not None:
            fields = {} if step is None else {"step": step}
            self.exporter.event("checkpoint", path=str(Path(filepath).absolute()), deleted=True, **fields)

    def _tearing_down(self, original: Callable[..., Any]) -> Any:
        try:
            return original()  # waits for what is still being saved
        except BaseException:
            self._reason = ("exception", 1)
            raise
        finally:
            self._finish()

    def _processing(self, original: Callable[..., Any], dataloader: Any) -> Any:
        processed = original(dataloader)
        late = self._late(processed) if self._trainer.training else None
        return processed if late is None else late

    @_quietly
    def _late(self, loader: Any) -> Any:
        """Wrap the train loader. By now Lightning has given it its distributed sampler."""
        if self.exporter is None or self._wrap is None:
            return None
        if self._loader is not None and self._loader.fresh:
            self._notices.say("several loaders", "there are several train loaders: the first alone has positions")
            return None
        arguments = self._wrap
        counted = self.exporter.follow(
            lambda skips: cast(WatchedLoader, DrawnAhead(watch(loader, skips=skips, **arguments)))
        )
        if counted is None:
            return None
        kind = _LateStatefulLoader if counted.kind == "state_dict" else _LateLoader
        state, self._loader_state = self._loader_state, None
        self._loader = kind(cast(DrawnAhead, counted), state, self._trainer.fit_loop, self._notices)
        return self._loader

    # How it works.

    def _state_step(self) -> tuple[int, int]:
        """Return the trainer's count and the number of the newest step made, whether or not its record is closed yet."""
        if self._trainer is None:
            return self._seen
        at = int(self._trainer.global_step)
        return at, self._seen[1] + (1 if at > self._seen[0] else 0)

    @_quietly
    def _finish(self) -> None:
        """End the record, and leave trainer and strategy as they were."""
        undo, self._undo = self._undo, []
        for one in undo:
            one()
        exporter, self.exporter = self.exporter, None
        self._loader, self._trainer, self._paths = None, None, {}
        if exporter is not None:
            self._phases.close()
            exporter.close(*self._reason)
            self._past += exporter.notices


class _LateLoader:
    """What Lightning is given in place of its train loader.

    Lightning begins a pass before it says which epoch it is, and never draws what would end one. So a pass begins at its first batch here, at the
    position of the checkpoint if that lies in the epoch that Lightning trains, else at the epoch's beginning. The position is kept in the
    callback's state and not in Lightning's list of loader states, which refuses to load where the loaders are not the same as before.
    """

    def __init__(self, counted: DrawnAhead, state: dict[str, Any] | None, fit_loop: Any, notices: Notices) -> None:
        self.counted = counted
        self.watched = watched = counted.loader
        #: Whether no pass has begun yet.
        self.fresh = True
        self._state = state
        self._fit_loop = fit_loop
        self._notices = notices
        self._epoch: int | None = None
        if state is not None and watched.replayable and type(self) is _LateLoader:
            # Lightning warns of data that does not go on where it was unless it finds these two; it calls neither.
            vars(self).update(state_dict=dict, load_state_dict=self._load)

    def __iter__(self) -> Iterator[Any]:  # a generator: it begins with its first batch
        try:
            self._begin()
        except Exception as error:
            self._notices.fault("where the data goes on", error)
        yield from self.counted

    def _begin(self) -> None:
        self.fresh = False
        for name in ("state_dict", "load_state_dict"):
            vars(self).pop(name, None)
        epoch = int(self._fit_loop.epoch_progress.current.processed)
        if epoch == self._epoch:
            return  # a shorter loader that begins anew beside a longer one
        self._epoch = epoch
        state, self._state = self._state, None
        if state is not None and state.get("epoch") == epoch:
            self._load(state)
        elif self.watched.kind == "map":
            self.watched.set_epoch(epoch)
        else:  # whose order is not ours: its number alone
            self.watched.place(epoch, 0)

    def _load(self, state: dict[str, Any]) -> None:
        self.watched.load_state_dict(state)

    def __len__(self) -> int:
        return len(self.watched)

    def __bool__(self) -> bool:
        return bool(self.watched)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_") or name in ("counted", "watched", "state_dict", "load_state_dict"):
            raise AttributeError(name)
        return getattr(self.watched, name)


class _LateStatefulLoader(_LateLoader):
    """The same around a loader that has a state of its own, which Lightning saves and loads as it would without us."""

    _inner_state: dict[str, Any] | None = None

    def state_dict(self) -> dict[str, Any]:
        """Return the user's loader's own state."""
        found: dict[str, Any] = self.watched.state_dict()["inner"]
        return found

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Keep the state until the pass begins."""
        self._inner_state = state

    def _begin(self) -> None:
        super()._begin()
        if self._inner_state is not None:  # without a position of ours
            self.watched.load_state_dict(self._inner_state)
            self._inner_state = None

    def _load(self, state: dict[str, Any]) -> None:
        if self._inner_state is not None:
            inner, self._inner_state = self._inner_state, None
            self.watched.load_state_dict({**state, "inner": inner})


def _save_apart(trainer: Any, folder: Path) -> Any:
    """Save elsewhere than the trainer's checkpoints, which count and remove nothing there; return the future of a save to come."""
    type(trainer).save_checkpoint(trainer, folder / "state.ckpt")  # not by way of what reports checkpoints
    return _pending_save(trainer.strategy.checkpoint_io)


def _pending_save(io: Any) -> Future[None] | None:
    """Return what is done when an asynchronous checkpoint plugin has written what it was given; None: it is written.

    Lightning's has one thread and keeps no future: what is handed to that thread next is done after the save.
    """
    executor = getattr(io, "_executor", None)
    if executor is None:
        return None

    def look() -> None:
        if io._error is not None:
            raise io._error

    future: Future[None] = executor.submit(look)
    return future
