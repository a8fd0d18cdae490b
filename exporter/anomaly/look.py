"""The close look itself: the training thread's side. It begins with the first step that is asked for and ends after the last.

Everything runs in the middle of the trainer's own forward, backward and update. Nothing waits, no tensor of the run is written, and what
goes wrong in here ends the look, not the training.
"""

from __future__ import annotations

import sys
import threading
import time
from bisect import bisect_right
from collections.abc import Callable, Sequence
from contextlib import ExitStack, nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from trainwarden.exporter import observer as observing
from trainwarden.exporter.drain import Drain, Fetch
from trainwarden.exporter.inside import _beside_modes
from trainwarden.exporter.notices import Notices
from trainwarden.exporter.observer import Observer
from trainwarden.exporter.sheet import Sheet
from trainwarden.exporter.staging import Staging
from trainwarden.exporter.watched import Watched, local

from . import backward, hooks
from .compiled import anything, tracing
from .gathering import IN_BACKWARD, Call, Gathering, Layout, Node, Pass, Rows, laid_out
from .mode import Mode
from .numbers import FINITE, is_bad, is_harm, readable, row, tensors_in
from .operations import Operations
from .where import Sites

#: Modules and parameters that are looked at, and numbers of one step that are sent.
MODULES, PARAMETERS, NUMBERS = 16_384, 16_384, 2**19

#: Takes an arrived step: layout, values by name, and how to tell of something.
Take = Callable[[Layout, dict[str, Any], Callable[[str, dict[str, Any]], None]], None]


class Looking:
    """Looks closely while it is on; see :class:`exporter.anomaly.asked.CloseLooks` for when that is."""

    def __init__(
        self,
        found: hooks.Found,
        optimizers: Sequence[torch.optim.Optimizer],
        watched: Watched,
        observer: Observer,
        drain: Drain,
        notices: Notices,
        take: Take,
        late: Callable[[str, int, dict[str, Any]], None],
    ) -> None:
        """``late`` records an event of a step that breaks off and is never closed: its kind, the step, its fields. Drain thread."""
        self.found = found
        self._optimizers = list(optimizers)
        self._watched = watched
        self._observer = observer
        self._drain = drain
        self._notices = notices
        self._take = take
        self._late = late
        devices = {local(parameter).device for parameter in watched.params}
        #: Of its own: a step's numbers are many, and the memory that they are copied into is had before the first of them.
        self._staging = Staging(devices, NUMBERS)
        self._sites = Sites()
        self._mode = Mode()
        self._handles: list[Any] = []
        self._fast: list[Any] = []
        self._operations: Operations | None = None
        self._open: Pass | None = None
        #: Each open call within it, and whether what it was given was not finite.
        self._open_calls: list[tuple[Call, Tensor | None]] = []
        self._step = Gathering(step=0)
        self._stacks: dict[int, list[int]] = {}
        self._bounds: dict[int, tuple[list[int], list[int]]] = {}
        self._depth = 0
        self._thread = threading.get_ident()
        self.on = False
        #: What could not be seen, by what it is.
        self.absent: dict[str, str] = {}

    def settled(self) -> bool:
        """Whether nothing of it is left in torch."""
        return self._mode.off()

    def begin(self, step: int, check_nan: bool) -> None:
        """Look at the step that is open now."""
        if not self.on:
            self._attach(check_nan)
        self._thread = threading.get_ident()
        self._stacks, self._bounds, self._depth = {}, {}, 0
        self._leave_operations()
        first = self._step.step == 0
        self._step = Gathering(step=step)
        if first:
            self._guarded(self._look_at_parameters)
        self._mode.on()

    def _attach(self, check_nan: bool) -> None:
        self.on = True
        self._mode = Mode(check_nan)
        fast = set(self.found.fast)
        self._handles = hooks.hook(self.found, (n for n in range(len(self.found.modules)) if n not in fast), self)
        self._handles += [one.register_step_pre_hook(self._updating) for one in self._optimizers]
        backward.listen(self)
        self._observer.beside = [*self._observer.beside, self]
        if self.found.compiled:
            self.absent["compiled"] = f"what is inside of {', '.join(self.found.compiled[:3])}, and every operation"
        if self.found.left_out:
            self.absent["modules"] = f"{self.found.left_out} modules beyond the first {MODULES}"
        if len(self._watched) > PARAMETERS:
            self.absent["parameters"] = f"{len(self._watched) - PARAMETERS} parameters beyond the first {PARAMETERS}"

    def detach(self) -> None:
        """Take everything away; torch is as it was."""
        self.on = False
        self._leave_operations()
        backward.forget(self)
        for handle in (*self._handles, *self._fast):
            handle.remove()
        self._handles, self._fast = [], []
        self._observer.beside = [one for one in self._observer.beside if one is not self]
        self._mode.off()
        self._open, self._step = None, Gathering(step=0)

    def _fail(self, where: str, error: Exception) -> None:
        self._notices.fault(where, error)
        self.absent["fault"] = f"everything after a fault: {type(error).__name__}"
        self.detach()

    def _guarded(self, function: Callable[..., Any], *arguments: Any) -> Any:
        """Call a function of ours, so that neither it nor a fault of it meets anything of the trainer's."""
        if not self.on:
            return None
        began = time.perf_counter()
        try:
            if observing._capturing():
                self.absent["graph"] = "what a CUDA graph replays"
            elif not tracing():
                with torch.no_grad(), torch._C.DisableTorchFunction(), _beside_modes(), _in_full():
                    return function(*arguments)
        except Exception as error:
            self._fail("looking closely", error)
        finally:
            self._observer.seconds += time.perf_counter() - began
        return None

    # The way forward.

    def entered(self, number: int, module: nn.Module, given: Any) -> None:
        """See :class:`exporter.anomaly.hooks.Listener`."""
        here = threading.get_ident()
        again = torch._C._current_graph_task_id() != -1  # checkpointing's: a forward within the backward pass
        if not self.on or (not again and here != self._thread):
            if self.on and torch.is_grad_enabled():
                self.absent["threads"] = "what other threads call"
            return
        stack = self._stacks.setdefault(here, [])
        if stack and stack[0] == number and not again:
            stack.clear()  # the last one was interrupted
        outermost = not stack and not again
        stack.append(number)
        if outermost:
            self._open_pass(number, module, given)
        self._note_bound(here, number)
        if self._open is not None and not again:
            began, around = len(self._open.operations), stack[-2] if len(stack) > 1 else -1
            makers = () if self._operations is None else self._operations.makers(given)
            harm = self._guarded(_any_harm, given)
            self._open_calls.append((Call(number, began, began, around, makers), harm))

    def _open_pass(self, number: int, module: nn.Module, given: Any) -> None:
        self._leave_operations()
        self._open, self._open_calls = None, []
        grad = torch.is_grad_enabled()
        self._listen_on_the_slow_way(grad)
        if not grad or self._observer.phase == "evaluation":
            return
        self._mode.on()
        self._open = Pass(opener=number, counts=module.training)
        self._step.passes.append(self._open)
        self._open.taken = self._guarded(_any_bad, given)
        if self._can_see_operations():
            self._operations = Operations(self._open, self._sites, self._guarded)
            self._operations.enter()

    def _can_see_operations(self) -> bool:
        """A mode is part of what a compiled function was compiled for: none is entered where anything is compiled."""
        if self.found.anything_compiled or anything():
            self.absent.setdefault("operations", "operations of the forward pass: something is compiled")
            return False
        return True

    def _listen_on_the_slow_way(self, grad: bool) -> None:
        if grad and not self._fast:
            self._fast = hooks.hook(self.found, iter(self.found.fast), self)
        elif not grad:
            for handle in self._fast:
                handle.remove()
            self._fast = []

    def left(self, number: int, module: nn.Module, output: Any) -> None:
        """See :class:`exporter.anomaly.hooks.Listener`."""
        here = threading.get_ident()
        stack = self._stacks.get(here)
        if not self.on or not stack or number not in stack:
            return
        again = torch._C._current_graph_task_id() != -1
        while stack.pop() != number:
            if self._open is not None and not again:
                self._open_calls.pop()
        self._note_bound(here, stack[-1] if stack else -1)
        broken = output is None and sys.exc_info()[1] is not None
        seen = self._open
        if again:
            self._guarded(self._follow, number, output, None)
        elif seen is not None:
            call, given = self._open_calls.pop()
            if not broken:
                self._guarded(self._look, seen, call, given, output)
        if not stack and not again:
            self._leave_operations()
            if seen is not None:
                self._guarded(seen.pack)
            self._open = None
            if broken:
                self._mode.off()
                self._step.passes = [one for one in self._step.passes if one is not seen]

    def _leave_operations(self) -> None:
        if self._operations is not None:
            self._operations.leave()
            self._operations = None

    def _note_bound(self, thread: int, number: int) -> None:
        """Note which module runs from here on, by the number that the next node of autograd's gets."""
        numbers, modules = self._bounds.setdefault(thread, ([], []))
        numbers.append(torch._C._autograd._get_sequence_nr())
        modules.append(number)

    def _look(self, seen: Pass, call: Call, given: Tensor | None, output: Any) -> None:
        made = [x for x in map(readable, tensors_in(output)) if x is not None]
        made = [x for x in made if x.device == made[0].device]
        if made:
            found = row(made[0])
            for other in made[1:]:
                found = torch.cat([found[:FINITE], found[FINITE:] + row(other)[FINITE:]])
            seen.rows.add(call.module, found)
            seen.bad.add(len(seen.calls), found[FINITE] < found[-1])
            if given is not None:
                seen.given.add(len(seen.calls), given)
            seen.calls.append(call._replace(ended=len(seen.operations)))
        self._follow(call.module, output, seen)

    def _follow(self, number: int, output: Any, seen: Pass | None) -> None:
        """Look at the gradient of an output when the backward pass comes by."""
        given = next(iter(tensors_in(output)), None)
        if given is not None and given.requires_grad and not given.is_leaf:
            given.register_hook(partial(self._came_by, self._step, number))  # type: ignore[no-untyped-call]
            if seen is not None and not seen.counts:
                given.register_hook(seen.commit)  # type: ignore[no-untyped-call]

    def _came_by(self, step: Gathering, number: int, gradient: Any) -> None:
        self._guarded(self._came, step, number, gradient)

    def _came(self, step: Gathering, number: int, gradient: Any) -> None:
        x = readable(gradient)
        if x is not None and step is self._step:
            step.gradients.add(number, row(x))

    # The way back.

    def backward(self, roots: list[Any], gradients: Any) -> None:
        """See :class:`exporter.anomaly.backward.Listener`."""
        if self.on and self._observer.phase != "evaluation":
            self._depth += 1
            self._guarded(self._walk, roots, gradients)

    def _walk(self, roots: list[Any], gradients: Any) -> None:
        numbers, modules = self._bounds.get(threading.get_ident(), ([], []))
        told = partial(self._told, numbers, modules)
        for root in roots if self._depth == 1 else ():
            x, node = readable(root), backward.node_of(root)
            if x is not None and node is not None:
                self._step.roots.append((is_bad([x]), told(node)))
        coming = _any_bad(gradients)
        if coming is not None and self._depth == 1:
            self._step.incoming.append(coming)
        for node in backward.unhooked(roots, self._step.step, IN_BACKWARD):
            node.register_hook(partial(self._ran, self._step, told(node)))

    def _told(self, numbers: list[int], modules: list[int], node: Any) -> Node:
        """Return what is known of a node: the module whose forward made it is the one that ran when its number was given."""
        at = bisect_right(numbers, node._sequence_nr()) - 1
        return node.name(), modules[at] if at >= 0 else -1, self._sites.told(node.metadata.get("traceback_", []))

    def _ran(self, step: Gathering, node: Node, made: Any, given: Any) -> None:
        if step is self._step:
            self._guarded(self._note_node, step, node, made, given)

    def _note_node(self, step: Gathering, node: Node, made: Any, given: Any) -> None:
        if len(step.nodes) >= IN_BACKWARD:
            self.absent["nodes"] = f"nodes of the backward pass beyond {IN_BACKWARD} in a step"
            return
        bad, before = _any_bad(made), _any_bad(given)
        if bad is not None:
            if before is not None and before.device == bad.device:
                bad = bad & ~before
            step.ran.add(len(step.nodes), bad)
            step.nodes.append(node)

    def backward_over(self, error: BaseException | None) -> None:
        """See :class:`exporter.anomaly.backward.Listener`."""
        if not self._depth:
            return
        self._depth -= 1
        if not self._depth:
            self._guarded(self._step.fold)
            if error is not None:
                self._mode.off()
                self._guarded(self._send, None)
                self._step = Gathering(step=self._step.step)  # what was begun does not count

    # The end of the step.

    def _updating(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        self._guarded(self._look_at_gradients, [p for group in optimizer.param_groups for p in group["params"]])

    def _look_at_gradients(self, parameters: Sequence[Tensor]) -> None:
        """Look at gradients as the optimizer gets them."""
        self._step.updated = True
        indices, gradients = self._watched.gradients(parameters)
        for index, gradient in zip(indices, gradients, strict=True):
            x = readable(gradient)
            if x is not None and index < PARAMETERS:
                self._step.updating.add(index, row(x))

    def _look_at_parameters(self) -> None:
        before = self._step.before = Rows()
        self._measure(before)

    def _measure(self, rows: Rows) -> None:
        for index, parameter in enumerate(self._watched.params[:PARAMETERS]):
            x = readable(parameter)
            if x is not None:
                rows.add(index, row(x))
        rows.fold(rows.pack())

    def take(self, sheet: Sheet) -> None:
        """Send what the step brought."""
        if self.on and self._step.step:
            self._leave_operations()
            self._guarded(self._close, sheet)

    def _close(self, sheet: Sheet) -> None:
        step = self._step
        if not step.updated:  # a scaler that skips runs no hook of the optimizer's
            self._look_at_gradients(self._watched.params)
        step.scaled = any(name == "loss_scale" for name, _, _ in sheet.tensors)
        self._measure(step.parameters)
        if not any(one.calls for one in step.passes):
            self.absent["modules called"] = "modules: none was called as Python (compiled, or elsewhere)"
        self._send(sheet)

    def _send(self, sheet: Sheet | None) -> None:
        """Send what there is of the step; without a sheet it broke off, and what is found is told beside the steps."""
        step = self._step
        step.updating.fold(step.updating.pack())
        if sheet is not None:
            step.fold(last=True)
        layout, sent = laid_out(step, NUMBERS)
        layout.closed = sheet is not None
        own = Sheet()
        for name, values in sent:
            own.add(name, values)
        staged = self._staging.send(own) if sent else None
        if staged is None:
            self.absent["values"] = "values of some steps, for which there was no room"
            return
        tell = partial(_late, self._late, step.step) if sheet is None else partial(_beside, sheet.host)
        self._drain.submit(Fetch(staged, lambda values: self._take(layout, values, tell)))


def _beside(host: dict[str, Any], kind: str, fields: dict[str, Any]) -> None:
    """Have an event recorded before the record of its step."""
    host.setdefault("events", []).append((kind, fields))


def _late(record: Callable[[str, int, dict[str, Any]], None], step: int, kind: str, fields: dict[str, Any]) -> None:
    record(kind, step, fields)


def _any_bad(value: Any) -> Tensor | None:
    """Return whether any of the tensors in ``value`` is not finite, None where there is none to look at."""
    found = [x for x in map(readable, tensors_in(value)) if x is not None]
    found = [x for x in found if x.device == found[0].device]
    return is_bad(found) if found else None


def _any_harm(value: Any) -> Tensor | None:
    return is_harm(tensors_in(value))


def _in_full() -> Any:
    """Ours are computed in the precision in which they come."""
    if not torch._C._is_any_autocast_enabled():
        return nullcontext()
    stack = ExitStack()
    for kind in ("cuda", "cpu"):
        if torch.is_autocast_enabled(kind):
            stack.enter_context(torch.autocast(kind, enabled=False))
    return stack
