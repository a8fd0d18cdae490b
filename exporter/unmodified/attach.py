"""Follows a training loop that nobody told of us, and closes a record for each of its steps.

A record is open from the end of the one before it. It is closed at the first sign of the next step, after the last optimizer
of the step has stepped: the model is called in training mode, a backward pass begins, or an optimizer steps that has stepped
in it already. Not before: what a script logs of a step it logs after the update, and a GradScaler is updated then. At the end
of the process the last step is closed. No hook of an optimizer closes a record by itself, since none fires where a GradScaler
skips a step; the scaler's own ``step`` counts as the optimizer's, whether or not it updates anything.

Where a sign comes while another optimizer of the step is still waited for, what was seen is set aside. It is joined to what
follows if that optimizer steps next, and is a step of its own if one steps again that has stepped.
"""

from __future__ import annotations

import atexit
import logging
import os
import sys
import threading
import time
import weakref
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from trainwarden.exporter.adapters import tensorboard, wandb
from trainwarden.exporter.hooks import backward, clipping
from trainwarden.exporter.hooks import scaler as scaling

from .cycle import Cycle
from .early import Early
from .logged import Logged, Number
from .losses import Losses
from .model import Found, Unknown, find, holds
from .options import Options, attached_above, mark_attached, options

log = logging.getLogger("trainwarden.exporter")

#: What a record of a script without our lines cannot hold.
ABSENT = ("sample positions", "skips", "checkpoints", "events", "resume")
#: Calls of the model without a gradient, for so many seconds and with none of the training's in between, are an evaluation.
EVALUATION_SECONDS = 5.0
#: Batches of one step that are kept for the fingerprint.
BATCHES = 64
#: To look for what trains goes through all of Python's objects: it is done so many times in vain.
LOOKS = 3


@dataclass(slots=True)
class Aside:
    """What was seen of a step up to a sign that may be one of the next."""

    sheet: Any
    loss: Tensor | None
    logged: tuple[dict[str, Number], Number | None]
    batches: list[Any]


class Attachment:
    """One process. Everything here is called in the middle of the trainer's own code and raises nothing into it."""

    def __init__(self, settings: Options) -> None:
        self._settings = settings
        self._on = True
        self._thread: int | None = None
        self._handles: list[Any] = []
        self._losses, self._logged, self._early = Losses(), Logged(), Early()
        self._exporter: Any = None
        self._observer: Any = None
        self._cycle = Cycle(())
        self._members: set[int] = set()  # ids of the optimizers that are watched, and of what they train
        self._params: set[int] = set()
        self._inside: Any = None  # the optimizer that is stepping
        self._by_scaler = False
        self._calls = 0  # of the closure that it was given
        self._ripe = False  # an optimizer stepped since the last sign
        self._aside: Aside | None = None
        self._seen = 0  # batches of the open step
        self._called: list[Any] = []
        self._captured = False
        self._looks = 0  # for what trains, in vain
        self._untrained: float | None = None  # since when the model is called without a gradient

    def listen(self) -> None:
        """Begin to listen."""
        self._handles.append(register_optimizer_step_pre_hook(self._before))
        self._handles.append(register_optimizer_step_post_hook(self._after))
        backward.listen(self)
        clipping.listen(self)
        scaling.listen(self)
        _alive.add(self)

    def leave(self) -> None:
        """Listen no more. What optimizers call stays, and does nothing: it may be one of them that is being called."""
        self._on = False
        self._early.forget()
        for hook in self._called:
            hook.remove()
        self._called.clear()
        atexit.unregister(self._at_exit)
        backward.forget(self)
        clipping.forget(self)
        scaling.forget(self)

    def remove(self) -> None:
        """Take off what optimizers call; torch is as it was."""
        self.leave()
        for handle in self._handles:
            handle.remove()
        self._handles.clear()

    def abandon(self) -> None:
        """In a forked child: the run that is watched is the parent's."""
        self._on = self._on and self._exporter is None

    def _guarded(self, function: Callable[..., Any], *arguments: Any) -> Any:
        """Call one of our own functions; a fault in it is said once and costs what it was about."""
        if not self._on or torch.compiler.is_compiling():
            return None
        if self._thread is not None and self._thread != threading.get_ident():
            return None
        if torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing():  # type: ignore[no-untyped-call]
            self._captured = True  # what ran now would become part of the graph
            return None
        try:
            with torch.no_grad():
                return function(*arguments)
        except Exception as error:
            self._fault(f"following the training loop ({function.__name__.strip('_')})", error)
            return None

    def _fault(self, where: str, error: Exception) -> None:
        if self._exporter is not None:
            self._exporter._notices.fault(where, error)
        else:
            log.warning("trainwarden: %s: %s: %s; not observed", where, type(error).__name__, error)
            self.leave()

    # What torch tells.

    def _before(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> Any:
        return self._guarded(self._step_begins, optimizer, args, kwargs)

    def _after(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        if self._inside is optimizer and not self._by_scaler:
            self._guarded(self._step_ended, optimizer)

    def backward(self, roots: list[Tensor]) -> None:
        """A backward pass begins."""
        self._guarded(self._backward, roots)

    def scaled(self, scaler: Any, outputs: Any, result: Any) -> None:
        """A scaler multiplied a loss."""
        self._guarded(self._scaled, scaler, outputs, result)

    def total_norm(self, tensors: list[Tensor], each: Tensor | None, total: Tensor, norm_type: float) -> None:
        """A norm was taken."""
        self._guarded(self._pass_on, "total_norm", tensors, each, total, norm_type)

    def clipping(self, parameters: list[Tensor], max_norm: Any, total: Tensor) -> None:
        """Gradients are about to be clipped."""
        self._guarded(self._pass_on, "clipping", parameters, max_norm, total)

    def clipping_values(self, parameters: list[Tensor]) -> None:
        """Elements of gradients are about to be clamped."""
        self._guarded(self._pass_on, "clipping_values", parameters)

    def unscaling(self, scaler: Any, optimizer: torch.optim.Optimizer) -> None:
        """Gradients are about to be divided by the loss scale."""
        self._guarded(self._pass_on, "unscaling", scaler, optimizer)

    def stepping(self, scaler: Any, optimizer: torch.optim.Optimizer) -> None:
        """A scaler steps an optimizer."""
        if scaler.is_enabled():
            self._guarded(self._scaler_steps, scaler, optimizer)

    def stepped(self, scaler: Any, optimizer: torch.optim.Optimizer) -> None:
        """It is done."""
        if self._by_scaler:
            self._guarded(self._scaler_stepped, scaler, optimizer)

    def called(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        """One of the modules that own what is trained is called."""
        if module.training and torch.is_grad_enabled():
            self._guarded(self._forward, module, args, kwargs)
        else:
            self._guarded(self._without_gradient)

    def logged(self, values: Mapping[str, Any]) -> None:
        """The script logs some numbers."""
        self._guarded(self._logged.add, values)

    # What that means.

    def _pass_on(self, method: str, *arguments: Any) -> None:
        """Tell the observer, or keep it until there is one. A call between two steps is a sign of the next."""
        if self._observer is not None:
            if method in ("total_norm", "clipping"):
                self._sign(only_whole=True)
            getattr(self._observer, method)(*arguments)
        elif method in ("total_norm", "clipping"):
            getattr(self._early, method)(*arguments)
        else:
            self._early.keep(method, *arguments)

    def _scaled(self, scaler: Any, outputs: Any, result: Any) -> None:
        self._sign()
        self._losses.scaled(scaler, outputs, result)

    def _backward(self, roots: list[Tensor]) -> None:
        self._sign()
        if self._exporter is None:
            self._early.backward()
        if self._calls <= 1:  # an optimizer may ask its closure several times: the first loss is the step's
            self._losses.backward(roots)

    def _forward(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        self._sign()
        if self._calls > 1 or self._seen >= BATCHES:
            return
        from .calls import batch_of

        batch = batch_of(args, kwargs)
        if batch is None:
            return
        self._exporter._batches.append(batch)
        self._seen += 1
        if len(self._called) > 1:  # this is the one that is given the tokens; those inside it are not asked again
            for hook in self._called:
                if hook.module() is not module:
                    hook.remove()
            self._called = [hook for hook in self._called if hook.module() is module]

    def _without_gradient(self) -> None:
        now = time.monotonic()
        if self._untrained is None:
            self._untrained = now
        if now - self._untrained >= EVALUATION_SECONDS:
            self._exporter._enter("evaluation")

    def _step_begins(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> Any:
        if self._inside is optimizer and self._by_scaler:
            return None
        if not self._enter(optimizer):
            return None
        return self._counting(args, kwargs)

    def _counting(self, args: Any, kwargs: Any) -> Any:
        """Return the arguments of ``step`` with a closure that counts its calls; None where there is no closure."""
        given = kwargs.get("closure", args[1] if len(args) > 1 else None)
        if not callable(given):
            return None

        def closure(*arguments: Any, **named: Any) -> Any:
            self._calls += 1
            return given(*arguments, **named)

        if "closure" in kwargs:
            return args, {**kwargs, "closure": closure}
        return (args[0], closure, *args[2:]), kwargs

    def _enter(self, optimizer: torch.optim.Optimizer, scaler: Any = None) -> bool:
        """Take note that an optimizer begins to step; say whether it belongs to what is watched."""
        if self._exporter is None and not self._attach(optimizer, scaler):
            return False
        if id(optimizer) not in self._members and not self._joins(optimizer):
            return False
        if self._cycle.repeats(id(optimizer)):
            self._split()
        elif self._aside is not None:
            self._join()
        self._inside, self._by_scaler, self._calls = optimizer, scaler is not None, 0
        return True

    def _step_ended(self, optimizer: torch.optim.Optimizer) -> None:
        self._inside, self._by_scaler, self._calls = None, False, 0
        self._cycle.stepped(id(optimizer))
        self._ripe = True

    def _scaler_steps(self, scaler: Any, optimizer: torch.optim.Optimizer) -> None:
        untold = self._losses.seen and not self._losses.scaling
        if not self._enter(optimizer, scaler):
            return
        if untold:
            self._losses.forget()
            self._exporter._notices.say(
                "scaled loss", "the loss is scaled in a way that cannot be followed: it is left out"
            )
        self._observer.stepping(scaler, optimizer)

    def _scaler_stepped(self, scaler: Any, optimizer: torch.optim.Optimizer) -> None:
        if self._inside is optimizer:
            self._observer.stepped(scaler, optimizer)
            self._step_ended(optimizer)

    def _joins(self, optimizer: torch.optim.Optimizer) -> bool:
        """Say whether an optimizer that was made later trains something that is watched."""
        if holds(optimizer, self._members) or not any(
            id(one) in self._params for group in optimizer.param_groups for one in group["params"]
        ):
            return False
        self._exporter._notices.say(
            "late optimizer",
            f"{type(optimizer).__name__} was made after the first step: its steps are counted, its own numbers are absent",
        )
        return True

    # When a record closes.

    def _sign(self, only_whole: bool = False) -> None:
        """Something happens that belongs to an open step or to the next one."""
        if self._untrained is not None:
            self._untrained = None
            if self._exporter._phase == "evaluation":
                self._exporter._enter("train")
        if self._inside is not None or not self._ripe:
            return
        if self._cycle.whole():
            self._close()
        elif not only_whole:
            self._join()
            self._aside = self._taken()
            self._observer.sheet = type(self._aside.sheet)(due=self._aside.sheet.due)
            self._ripe = False

    def _taken(self) -> Aside:
        """Return what was seen since the last record or sign, and begin anew."""
        batches, self._exporter._batches, self._seen = self._exporter._batches, [], 0
        return Aside(self._observer.sheet, self._losses.take(), self._logged.take(), batches)

    def _put_back(self, seen: Aside) -> None:
        """Go on from there; what came since stays as well."""
        self._observer.sheet = seen.sheet
        self._losses.put_back(seen.loss)
        self._logged.put_back(*seen.logged)
        self._exporter._batches = [*seen.batches, *self._exporter._batches]

    def _join(self) -> None:
        """What was set aside belongs to the same step as what came since."""
        aside, self._aside = self._aside, None
        if aside is None:
            return
        sheet, later = aside.sheet, self._observer.sheet
        sheet.tensors.extend(later.tensors)
        sheet.captures = [*sheet.captures, *later.captures]
        for name, value in later.host.items():
            before = sheet.host.get(name)
            if isinstance(value, dict) and isinstance(before, dict):
                before.update(value)
            else:
                sheet.host[name] = (
                    (*before, *value) if isinstance(value, tuple) and isinstance(before, tuple) else value
                )
        self._put_back(aside)

    def _split(self) -> None:
        """What was set aside is a step of its own; what came since belongs to the next one."""
        aside, self._aside = self._aside, None
        if aside is None:
            self._close()
            return
        later = self._taken()
        self._put_back(aside)
        self._close()
        later.sheet.due = self._observer.sheet.due
        self._put_back(later)

    def _close(self) -> None:
        """Close the open step's record."""
        values, logged_loss = self._logged.take()
        sheet = self._observer.sheet
        for name, value in values.items():
            if isinstance(value, torch.Tensor):
                sheet.add("logged", value, name)
            else:
                sheet.host.setdefault("logged", {})[name] = value
        if self._logged.refused:
            self._exporter._notices.say("logged", "the script logs under very many names: the later ones are left out")
        if self._captured:
            self._exporter._notices.say("graph", "a CUDA graph was captured: what is replayed from it cannot be seen")
        loss = self._losses.take()
        self._exporter.step(logged_loss if loss is None else loss)
        self._cycle.close()
        self._ripe, self._seen = False, 0
        self._stands_back()

    def _stands_back(self) -> bool:
        """Leave the process to an exporter that the script made itself, if it did; say whether it did."""
        from trainwarden.exporter import exporter

        others = [one for one in exporter._alive if one is not self._exporter and one._live() is not None]
        if not others:
            return False
        parts = others[0]._parts
        if parts is None or parts.identity.rank == 0:  # what all ranks do is said by one
            others[0]._notices.say(
                "exec", "trainwarden exec stands back: the script makes an Exporter itself, which sees what it is told"
            )
        self.leave()
        if self._exporter is not None:
            self._exporter.close()
        return True

    # The first step of an optimizer.

    def _attach(self, optimizer: torch.optim.Optimizer, scaler: Any) -> bool:
        """Find out what trains, make the exporter, and tell it what was seen so far. Say whether there is one now."""
        if attached_above() or self._stands_back():
            self.leave()
            return False
        try:
            found = find(optimizer)
            if not any(one is optimizer for one in found.optimizers):
                self._looks += 1  # it has another one step for it
                if self._looks < LOOKS:
                    return False
                raise LookupError(f"{type(optimizer).__name__} holds optimizers that never step")
        except LookupError as error:
            log.warning("trainwarden exec: not observed: %s", error)
            self.leave()
            return False
        from trainwarden.exporter.drain import Call
        from trainwarden.exporter.exporter import Exporter

        exporter = Exporter(found.model, found.optimizers, scaler=scaler, **self._settings.arguments())
        parts = exporter._parts
        if parts is None:
            self.leave()
            return False
        self._exporter, self._observer = exporter, parts.observer
        self._thread = threading.get_ident()
        parts.fields.update(attached="exec", absent=list(ABSENT))
        clipping.forget(parts.observer)  # told by us, once the step that it belongs to is known
        scaling.forget(parts.observer)
        self._early.tell(parts.observer)
        self._follow(found)
        if isinstance(found.model, Unknown):
            exporter._notices.say(
                "model", "no module owns what the optimizer trains: parameters have no names and groups"
            )
        atexit.register(self._at_exit)
        mark_attached()
        if parts.identity.rank == 0:
            where = f"http://{self._settings.host}:{exporter.port}/metrics" if exporter.port else "no port"
            sentence = (
                f"trainwarden exec: {parts.fields['model']} with {parts.fields['optimizer']} is run "
                f"{parts.identity.run}, attempt {parts.identity.attempt}: {where}, {parts.folder.path}\n"
            )
            parts.drain.submit(Call(lambda: sys.stderr.write(sentence)))
        return True

    def _follow(self, found: Found) -> None:
        """Listen to calls of the model."""
        from .calls import Hook

        self._members = {id(one) for one in found.optimizers}
        self._cycle = Cycle(self._members)
        self._params = {
            id(one) for optimizer in found.optimizers for group in optimizer.param_groups for one in group["params"]
        }
        self._called = [Hook(self.called, module) for module in found.called]

    def _at_exit(self) -> None:
        """Close the last step. Runs before the exporter's own end, which was registered earlier."""
        if not self._on or os.getpid() != self._exporter._pid:
            return
        self._inside = None
        if self._cycle.begun:
            self._guarded(self._split if self._aside is not None and not self._ripe else self._close)
        self.leave()


_attachments: list[Attachment] = []
_alive: weakref.WeakSet[Attachment] = weakref.WeakSet()


def _in_child() -> None:
    for attachment in list(_alive):
        attachment.abandon()


os.register_at_fork(after_in_child=_in_child)


def listen() -> None:
    """Watch this process, and the libraries in it that numbers are logged with. Called again when one was imported."""
    if not _attachments:
        settings = options()
        if settings is None or attached_above():
            return
        _attachments.append(Attachment(settings))
        _attachments[0].listen()
    backward.leave_untraced()
    for adapter in (tensorboard, wandb):
        adapter.listen(_attachments[0].logged)
