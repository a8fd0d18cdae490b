"""The training thread's side: keeps the open step's sheet and shows the probes what happens to it.

Nothing here reads a value, waits, or takes a lock. What goes wrong costs the signals of the probe it went wrong in.
"""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor, nn

from .cadence import Cadence
from .hooks import autocast, clipping, reduction, scaler
from .hooks.reduction import Source
from .losses import readable
from .measure import norms
from .notices import Notices
from .probes.learning_rate import rates
from .probes.probe import Closing, Probe, Update
from .sheet import Capture, Sheet
from .watched import Watched, as_numbers, local

#: Steps in a row in which none of the optimizers stepped, after some did, from which that is said.
STILL = 3


class Beside(Protocol):
    """Who sees more of a step than its update. None of these may raise."""

    def take(self, sheet: Sheet) -> None:
        """Put down what was seen since the last step."""

    def detach(self) -> None:
        """Stop to listen."""


class Door(Protocol):
    """Who stands where an update begins and ends, before the probes see what it did. Only its refusal of a first step may raise."""

    def before(self, optimizer: torch.optim.Optimizer) -> None:
        """The gradients are those that the optimizer uses next."""

    def after(self, optimizer: torch.optim.Optimizer) -> None:
        """The optimizer has used them."""

    def detach(self) -> None:
        """Stop to listen."""


class Observer:
    """Watches some optimizers of one model. ``factor`` gives the multiplier of the learning rate at a step."""

    def __init__(
        self,
        optimizers: Sequence[torch.optim.Optimizer],
        watched: Watched,
        probes: Sequence[Probe],
        cadence: Cadence,
        notices: Notices,
    ) -> None:
        self._optimizers = list(optimizers)
        self._watched = watched
        self._probes = list(probes)
        self._cadence = cadence
        self._notices = notices
        self._open: dict[int, Update] = {}
        self._depth: dict[int, int] = {}
        self._updated: set[int] = set()
        self._put: dict[int, list[Any]] = {}
        self._still: int | None = None
        self._scalers: dict[int, Any] = {}
        self._handles: list[Any] = []
        self.active = True
        self.factor: Callable[[int], float] = lambda step: 1.0
        #: Number of the step that is open.
        self.step = 1
        #: Seconds spent in here, and whether any clipping was seen.
        self.seconds = 0.0
        self.clips = False
        #: Types that an autocast was entered with.
        self.precisions: set[str] = set()
        self.sheet = Sheet(due=cadence.due(1))
        #: What the process does, and who else listens: it puts down what it saw when a step is closed.
        self.phase = "init"
        self.beside: list[Beside] = []
        #: Who may undo an update.
        self.doors: list[Door] = []
        self._opened = time.perf_counter()

    def attach(self, model: nn.Module | None = None) -> None:
        """Start to listen. ``model`` is the one whose gradients are looked at before ranks reduce them; None leaves that out."""
        for optimizer in self._optimizers:
            self._handles.append(optimizer.register_step_pre_hook(self._before))
            self._handles.append(optimizer.register_step_post_hook(self._after))
        try:
            clipping.listen(self)
        except Exception as error:
            self._notices.fault("norms before clipping", error)
        try:
            if model is not None:
                self._handles += reduction.listen(model, self, self._notices.say)
        except Exception as error:
            self._notices.fault("gradients before reduction", error)
        try:
            scaler.listen(self)
        except Exception as error:
            self._notices.fault("GradScaler", error)
        autocast.listen(self)

    def detach(self) -> None:
        """Stop to listen; torch is as it was."""
        self.active = False
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        for one in self.beside:
            one.detach()
        for door in self.doors:
            door.detach()
        clipping.forget(self)
        scaler.forget(self)
        autocast.forget(self)

    def join(self, door: Door, probe: Probe) -> None:
        """Let ``door`` stand at every update from now on, with the probe that reads what it puts on the sheet."""
        self._probes.append(probe)
        self.doors.append(door)

    def leave(self, door: Door) -> None:
        """Let it stand there no more."""
        self.doors = [other for other in self.doors if other is not door]

    def begin(self, step: int) -> None:
        """Open the sheet of ``step``."""
        self.step = step
        self.sheet = Sheet(due=self._cadence.due(step))
        self._open.clear()
        self._depth.clear()
        self._updated.clear()
        self._put.clear()
        self._opened = time.perf_counter()

    def close(self, loss: Tensor | float | None, consumed: Any, batches: Sequence[Any]) -> Sheet:
        """Let the probes look at the end of the step and return its sheet."""
        sheet = self.sheet
        for known in self._scalers.values():
            if getattr(known, "_scale", None) is not None:
                sheet.add("loss_scale.now", known._scale, id(known))
        for one in self.beside:
            one.take(sheet)
        self._note_stillness(sheet)
        try:
            loss = readable(loss)
        except Exception as error:
            self._notices.fault("the loss that a step was given", error)
            loss = None
        sheet.host["lr.factor"] = self.factor(self.step)
        closing = Closing(sheet=sheet, watched=self._watched, loss=loss, consumed=consumed, batches=batches)
        closing.regular = self._cadence.regular(self.step)
        self._show("close", closing)
        return sheet

    def _note_stillness(self, sheet: Sheet) -> None:
        if "updates" in sheet.host or "lr.nominal" in sheet.host:  # a step that a scaler skips has the latter alone
            self._still = 0
        elif self._still is not None:
            self._still += 1
            # Where a graph is replayed the optimizer steps unseen, and that is said already.
            replayed = any(self._notices.count(said) for said in ("graph", "silence"))
            if self._still == STILL and not replayed:
                self._notices.say(
                    "still",
                    f"no optimizer that the exporter was given stepped in the last {STILL} steps: norms, updates and moments are "
                    "absent. Was it replaced? Close the exporter and make another",
                )

    def _show(self, moment: str, what: Any, due: bool = True) -> None:
        """Show something to each probe; one that fails is not asked again, but where it was a batch's fault."""
        for probe in tuple(self._probes):
            if probe.costly and not due:
                continue
            before = (len(self.sheet.tensors), dict(self.sheet.host)) if probe.of_batches else None
            try:
                getattr(probe, moment)(what)
            except Exception as error:
                if before is None:
                    self._notices.fault(f"probe {probe.name}", error)
                    self._probes.remove(probe)
                    continue
                del self.sheet.tensors[before[0] :]
                self.sheet.host = before[1]
                says = f"probe {probe.name}: a batch cannot be read: {type(error).__name__}: {error}; its step goes without"
                self._notices.say(f"probe {probe.name}", says)

    # What torch tells. Each of these is called in the middle of the trainer's own code.

    def _guarded(self, function: Callable[..., None], *arguments: Any) -> None:
        if not self.active:
            return
        began = time.perf_counter()
        try:
            if not _capturing():
                with torch.no_grad():
                    function(*arguments)
        except Exception as error:
            self._notices.fault(f"observer {function.__name__}", error)
        finally:
            self.seconds += time.perf_counter() - began

    def _before(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> tuple[Any, Any] | None:
        depth = self._depth.get(id(optimizer), 0) + 1
        if depth > 1 and not _within_a_step_of(optimizer):
            self._guarded(self._break_off, optimizer)
            depth = 1
        self._depth[id(optimizer)] = depth
        if depth > 1 or not self.active:  # a subclass's step runs that of torch inside, and both tell
            return None
        closure = _closure(args, kwargs)
        if closure is None:
            self._guarded(self._open_update, optimizer)
            for door in self.doors:
                door.before(optimizer)
            return None
        return _with_closure(args, kwargs, self._opening(optimizer, closure))

    def _opening(self, optimizer: torch.optim.Optimizer, closure: Callable[..., Any]) -> Callable[..., Any]:
        """Return the closure, looking at the gradients once it has made them: before the step's first change."""

        def watched_closure(*args: Any, **kwargs: Any) -> Any:
            answer = closure(*args, **kwargs)
            if id(optimizer) not in self._open:  # LBFGS evaluates several times
                self._guarded(self._open_update, optimizer)
            for door in self.doors:
                door.before(optimizer)
            return answer

        self._open.pop(id(optimizer), None)  # of a step that was broken off
        return watched_closure

    def _break_off(self, optimizer: torch.optim.Optimizer) -> None:
        """The update that was begun ended with an exception: forget it, the one that begins now is the step's."""
        self._open.pop(id(optimizer), None)
        put = {id(entry) for entry in self._put.pop(id(optimizer), ())}
        self.sheet.tensors = [entry for entry in self.sheet.tensors if id(entry) not in put]
        if id(optimizer) in self._updated:
            self._updated.discard(id(optimizer))
            left = self.sheet.host.pop("updates", 1) - 1
            if left:
                self.sheet.host["updates"] = left

    def _after(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        depth = self._depth[id(optimizer)] = self._depth.get(id(optimizer), 1) - 1
        if depth <= 0:
            for door in self.doors if self.active else ():
                door.after(optimizer)
            self._guarded(self._close_update, optimizer)

    def _open_update(self, optimizer: torch.optim.Optimizer) -> None:
        if id(optimizer) in self._updated:
            sentence = "an optimizer steps more than once between two calls of exporter.step(): the first counts; call it after each"
            self._notices.say("several updates", sentence)
            return
        params = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        indices, gradients = self._watched.gradients(params)
        update = Update(
            optimizer=optimizer,
            sheet=self.sheet,
            watched=self._watched,
            params=[self._watched.params[index] for index in indices],
            gradients=gradients,
            indices=indices,
            grad_scale=_copy(getattr(optimizer, "grad_scale", None)),
        )
        self._open[id(optimizer)] = update
        self._updated.add(id(optimizer))
        self.sheet.host["updates"] = self.sheet.host.get("updates", 0) + 1
        before = len(self.sheet.tensors)
        self._show("before", update, due=self.sheet.due)
        self._put[id(optimizer)] = self.sheet.tensors[before:]

    def _close_update(self, optimizer: torch.optim.Optimizer) -> None:
        update = self._open.pop(id(optimizer), None)
        if update is not None:
            self._show("after", update, due=self.sheet.due)

    def total_norm(self, tensors: list[Tensor], each: Tensor | None, total: Tensor, norm_type: float) -> None:
        """A norm was taken; keep it if it is one of our gradients' and nothing was clipped yet."""
        self._guarded(self._total_norm, tensors, each, total, norm_type)

    def _total_norm(self, tensors: list[Tensor], each: Tensor | None, total: Tensor, norm_type: float) -> None:
        by_gradient = self._watched.by_gradient()
        found = [by_gradient.get(id(tensor), -1) for tensor in tensors]
        if not found or min(found) < 0:
            return  # not gradients of ours, or not gradients at all
        self._capture(found, tensors, each, total)

    def _capture(self, indices: list[int], gradients: list[Tensor], each: Tensor | None, total: Tensor | None) -> None:
        covers = frozenset(indices)
        if any(capture.clipped and capture.indices & covers for capture in self.sheet.captures):
            return  # they have been clipped since
        if each is not None:
            pieces = [(np.array(indices, dtype=np.int64), each)]
        else:
            dense = [(index, as_numbers(grad)) for index, grad in zip(indices, gradients, strict=True)]
            dense = [(index, grad) for index, grad in dense if grad.layout is torch.strided and grad.numel()]
            wide = self._watched.reach.wide("grad")
            pieces = list(norms([grad for _, grad in dense], [index for index, _ in dense], wide))
        captures = [capture for capture in self.sheet.captures if not capture.indices & covers]
        told = self._watched.told(indices, gradients)
        self.sheet.captures = [*captures, Capture(covers, pieces, total, told=told)]

    def clipping(self, parameters: list[Tensor], max_norm: Any, total: Tensor) -> None:
        """Gradients are about to be clipped."""
        self._guarded(self._clipping, parameters, max_norm, total)

    def _clipping(self, parameters: list[Tensor], max_norm: Any, total: Tensor | None) -> None:
        by_gradient = self._watched.by_gradient()
        gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
        pairs = [(by_gradient[id(gradient)], gradient) for gradient in gradients if id(gradient) in by_gradient]
        if not pairs:
            return
        covers = frozenset(index for index, _ in pairs)
        if not any(capture.indices == covers for capture in self.sheet.captures):
            self._capture([index for index, _ in pairs], [gradient for _, gradient in pairs], None, total)
        if isinstance(max_norm, float) and math.isinf(max_norm):
            return  # a trainer that does not clip, and takes the norm this way
        for capture in self.sheet.captures:
            if capture.indices == covers and not capture.clipped:
                capture.clipped = True
                capture.max_norm = max_norm
                if total is not None:
                    capture.total = _copy(total)  # a trainer may write into its own, to add up that of all ranks
                self.clips = True

    def clipping_values(self, parameters: list[Tensor]) -> None:
        """Elements of gradients are about to be clamped."""
        self._guarded(self._clipping, parameters, None, None)

    def gradients_ready(self, parameters: Sequence[Tensor]) -> None:
        """A trainer clips in a way of its own, and has done nothing to these parameters' gradients yet but to unscale them."""
        self._guarded(self._gradients_ready, parameters)

    def _gradients_ready(self, parameters: Sequence[Tensor]) -> None:
        indices, gradients = self._watched.gradients(parameters)
        if indices:
            self._capture(indices, gradients, None, None)

    def norm_taken(self, total: Tensor | float, max_norm: float | None) -> None:
        """The trainer took the norm of these gradients over all ranks, and clips by ``max_norm``, None where it does not."""
        self._guarded(self._norm_taken, total, max_norm)

    def _norm_taken(self, total: Tensor | float, max_norm: float | None) -> None:
        if isinstance(total, torch.Tensor):
            self.sheet.add("grad_norm.total", total.detach().clone())
        else:
            self.sheet.host["grad_norm.total"] = float(total)
        for capture in self.sheet.captures:
            if capture.total is None and capture.pieces:
                device = capture.pieces[0][1].device  # to be worked with where the gradients are
                known = isinstance(total, torch.Tensor)
                capture.total = total.detach().clone() if known else torch.full((), total, device=device)  # type: ignore[union-attr, arg-type]
                capture.max_norm, capture.clipped = max_norm, max_norm is not None

    def trainer_scaled(self, before: Tensor, after: Tensor, skipped: bool) -> None:
        """The trainer has a loss scale of its own: this one in the open step, that one from now on."""
        self._guarded(self._trainer_scaled, before, after, skipped)

    def _trainer_scaled(self, before: Tensor, after: Tensor, skipped: bool) -> None:
        self.sheet.add("loss_scale", before, "trainer")
        self.sheet.add("loss_scale.now", after.detach().clone(), "trainer")
        for number, optimizer in enumerate(self._optimizers):
            self.sheet.add("found_inf", torch.full((), float(skipped), device=before.device), id(optimizer))
            self.sheet.host.setdefault("lr.nominal", {})[number] = rates(optimizer)

    def autocast(self, dtype: str) -> None:
        """An autocast was entered."""
        if self.active:
            self.precisions.add(dtype)

    @property
    def due(self) -> bool:
        """Whether the open step is one in which costly things are looked at."""
        return self.sheet.due

    def own_gradient(self, source: Source, norm: Callable[[], Tensor | None]) -> None:
        """Gradients of this rank are there and not reduced yet."""
        self._guarded(self._own_gradient, source, norm)

    def _own_gradient(self, source: Source, norm: Callable[[], Tensor | None]) -> None:
        found = norm()
        if found is not None:
            self.sheet.add("rank.grad", found, source)

    def own_gradient_unknown(self) -> None:
        """What was put down of them in this step is not to be relied on."""
        self.sheet.host["rank.grad.unknown"] = True

    def own_backward_over(self) -> None:
        """This rank's backward pass is over, and it waits for the others next."""
        if self.active:
            self.sheet.host["rank.compute"] = time.perf_counter() - self._opened

    def unscaling(self, scaler: Any, optimizer: torch.optim.Optimizer) -> None:
        """Norms that were taken before this were of scaled gradients."""
        self._guarded(self._note_scale, scaler, optimizer)

    def stepping(self, scaler: Any, optimizer: torch.optim.Optimizer) -> None:
        """A scaler steps one of our optimizers."""
        self._guarded(self._stepping, scaler, optimizer)

    def stepped(self, scaler: Any, optimizer: torch.optim.Optimizer) -> None:
        """The scaler is done: keep what it found."""
        self._guarded(self._stepped, scaler, optimizer)

    def _ours(self, scaler: Any, optimizer: torch.optim.Optimizer) -> bool:
        known = any(optimizer is own for own in self._optimizers)
        return known and scaler.is_enabled() and getattr(scaler, "_scale", None) is not None

    def _note_scale(self, scaler: Any, optimizer: torch.optim.Optimizer) -> None:
        if self._ours(scaler, optimizer):
            own = {id(p) for group in optimizer.param_groups for p in group["params"]}
            for capture in self.sheet.captures:
                if capture.scale is None and all(id(self._watched.params[index]) in own for index in capture.indices):
                    capture.scale = scaler._scale.clone()

    def _stepping(self, scaler: Any, optimizer: torch.optim.Optimizer) -> None:
        if not self._ours(scaler, optimizer):
            return
        self._scalers[id(scaler)] = scaler
        state = scaler._per_optimizer_states.get(id(optimizer), {})
        if getattr(state.get("stage"), "name", "READY") == "READY":
            self._note_scale(scaler, optimizer)
        self.sheet.add("loss_scale", scaler._scale.clone(), id(scaler))
        nominal = self.sheet.host.setdefault("lr.nominal", {})
        nominal[self._optimizers.index(optimizer)] = rates(optimizer)

    def _stepped(self, scaler: Any, optimizer: torch.optim.Optimizer) -> None:
        if not self._ours(scaler, optimizer):
            return
        state = scaler._per_optimizer_states.get(id(optimizer), {})
        for found in state.get("found_inf_per_device", {}).values():
            self.sheet.add("found_inf", local(found).clone(), id(optimizer))


def _closure(args: Any, kwargs: Any) -> Callable[..., Any] | None:
    """Return the closure that ``step`` was given, or None. ``args`` begins with the optimizer itself."""
    given = kwargs.get("closure", args[1] if len(args) > 1 else None)
    return given if callable(given) else None


def _with_closure(args: Any, kwargs: Any, closure: Callable[..., Any]) -> tuple[Any, Any]:
    """Return the arguments of ``step`` with another closure in place of theirs."""
    if "closure" in kwargs:
        return args, {**kwargs, "closure": closure}
    return (args[0], closure, *args[2:]), kwargs


def _within_a_step_of(optimizer: torch.optim.Optimizer) -> bool:
    """Say whether a ``step`` of this optimizer runs within another of it: as a subclass's does that calls torch's."""
    frame, found = sys._getframe(1), 0
    while frame is not None and found < 2:
        known = frame.f_code.co_qualname == "Optimizer.profile_hook_step.<locals>.wrapper"
        found += known and frame.f_locals.get("self") is optimizer
        frame = frame.f_back  # type: ignore[assignment]
    return found > 1


def _capturing() -> bool:
    """Say whether a CUDA graph is being captured: what ran now would become part of it."""
    return bool(torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing())  # type: ignore[no-untyped-call]


def _copy(tensor: Tensor | None) -> Tensor | None:
    """Return a copy of a tensor that its owner goes on writing."""
    return None if tensor is None else tensor.detach().clone()
