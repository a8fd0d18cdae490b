"""The inside of the model: what its modules give back while it is trained, put down on the step's sheet.

A *pass* is one forward of the model; a step has as many as it accumulates. Only passes with gradients count: not those under
``no_grad`` or within ``phase("evaluation")``, not the forwards that checkpointing computes again during the backward pass, and
of a model in evaluation mode only those whose gradient is really computed. In steps that are due every module is read in
full. In the others the outputs of blocks are summed up, and of the smaller parts one feature of each token is: a value that is not
finite spreads over all features in the next linear layer, so that this finds it at hardly any cost.

Everything here runs in the middle of the trainer's own forward and backward. Nothing waits, and what goes wrong ends the
looking, not the training.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import _disable_current_modes

from . import observer as observing
from .blocks import Spot, find
from .hooks import attention, modules
from .logits import bound, log_sum_exp, of_scores, sampled
from .measure import accumulation
from .notices import Notices
from .passes import Cell, Pass, folded
from .routers import MOST, Routers
from .sheet import Sheet
from .watched import local

#: Numbers of one step at most; beyond, those of several passes are put together on the device.
NUMBERS = 4096
#: Forward passes of one step that are looked at.
PASSES = 1024
#: Steps in a row without any forward, after there were some, from which that is said.
SILENT = 3
#: What a row of a compiled graph holds: a sum, the largest absolute value, the sum of squares, the number of elements.
ROW = 4
#: Types that are looked at.
TYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


class Inside:
    """Listens to the modules of one model. ``observer`` knows the open step; see :meth:`attach`."""

    def __init__(self, model: nn.Module, notices: Notices) -> None:
        self._notices = notices
        self.structure = find(model)
        last, spots = self.structure.last_norm, self.structure.spots
        if last is not None:
            spots.append(Spot(len(spots), last.module, last.name, "residual", last.block, "", last.fast))
        self.spots = list(spots)
        # A gradient that comes to a part of a block has come through the block's own output before.
        whole = {spot.block for spot in self.spots if spot.group == "all"}
        self._telling = {spot.number for spot in self.spots if spot.group == "all" or spot.block not in whole}
        self.routers = Routers(model, self.structure, notices)
        self._observer: observing.Observer | None = None
        self._handles: list[Any] = []
        self._fast: list[Any] = []
        self._rows: dict[int, Tensor] = {}
        self._key = 0
        self._passes: list[Pass] = []
        self._open: Pass | None = None
        self._grads: list[tuple[Cell, Tensor]] = []
        #: Whether the trainer makes gradients where it was interrupted.
        self._grad = False
        self._fired = False
        self._traced = False
        self._silent: int | None = None
        self._unseen = 0
        #: The thread whose forwards are looked at: that which steps; before the first step, that of the first forward.
        self._thread: int | None = None

    @property
    def numbers(self) -> int:
        """The most numbers that a step puts down."""
        return MOST + (2 * NUMBERS + ROW * len(self.spots) if self.spots else 0)

    @property
    def due(self) -> bool:
        """Whether the open step is looked at closely."""
        return self._observer is not None and self._observer.sheet.due

    def attach(self, observer: observing.Observer) -> None:
        """Set the hooks. What is compiled already stays as it is."""
        if self.structure.compiled:
            names = self.structure.compiled
            self._notices.say(
                "compiled",
                f"{', '.join(names[:3])}{' and more' if len(names) > 3 else ''}: compiled before the exporter was made, so that "
                f"nothing within is looked at: make the exporter before torch.compile",
            )
        self._observer = observer
        observer.beside.append(self)
        try:
            self._handles += self.routers.listen(self)
        except Exception as error:
            self._fail("attaching to routers", error)
        if not self.spots and not self.routers.routers:
            return
        self._key = modules.number_of(self)
        try:
            for module in self.structure.above:
                self._handles.append(module.register_forward_pre_hook(modules.Entered(module, self)))
                self._handles.append(module.register_forward_hook(modules.Left(module, self)))
            for spot in self.spots:
                if not spot.fast:
                    self._handles.append(self._hook(spot))
            if self.spots:
                attention.listen(self)
        except Exception as error:
            self._fail("attaching to modules", error)

    def _hook(self, spot: Spot) -> Any:
        row = None
        parameter = next(spot.module.parameters(), None)
        if spot.group in ("all", "residual") and not spot.fast and parameter is not None:
            row = torch.zeros(ROW, device=local(parameter).device)
            # As a parameter: written in place by a graph, and no reason to give up CUDA graphs.
            row._dynamo_static_input_type = "unguarded"  # type: ignore[attr-defined]
            self._rows[spot.number] = row
        if spot.group == "residual":
            return spot.module.register_forward_pre_hook(modules.Took(spot.module, self, spot.number, row, self._key))
        return spot.module.register_forward_hook(modules.Gave(spot.module, self, spot.number, row, self._key))

    def detach(self) -> None:
        """Take the hooks away."""
        attention.forget(self)
        modules.forget(self._key)
        self.routers.forget()
        for handle in (*self._handles, *self._fast):
            handle.remove()
        self._handles, self._fast = [], []
        self._observer = None
        self._passes, self._open, self._grads = [], None, []

    # What the hooks tell.

    def entered(self, module: nn.Module) -> None:
        """See :class:`exporter.hooks.modules.ModuleListener`."""
        self._guarded(self._entered, module)

    def _entered(self, module: nn.Module) -> None:
        grad = self._grad
        known = self._open
        if known is not None and known.opener is not None and known.opener is not module and known.wanted is grad:
            return  # within it
        self._close_pass()
        evaluating = self._observer is not None and self._observer.phase == "evaluation"
        self._open = Pass(len(self._passes), grad and not evaluating, module.training, module)
        self._listen_on_the_slow_way(grad)
        if self._open.wanted:
            self._keep(self._open)

    def _keep(self, one: Pass) -> None:
        """Count a pass to the step. Passes without end, in a step that is never closed, must not fill the memory."""
        if len(self._passes) < PASSES:
            self._passes.append(one)
        else:
            one.wanted = False
            self._notices.say(
                "passes", f"a step has more than {PASSES} forward passes: the later ones are not looked at"
            )

    def left(self, module: nn.Module) -> None:
        """See :class:`exporter.hooks.modules.ModuleListener`."""
        if self._open is not None and self._open.opener is module:
            self._guarded(self._close_pass)

    def _close_pass(self) -> None:
        if self._open is not None:
            self._open.pack()
            self._open = None

    def _listen_on_the_slow_way(self, grad: bool) -> None:
        """Hook the modules that go another way without gradients as long as nobody listens: only with gradients."""
        if grad and not self._fast:
            self._fast = [self._hook(spot) for spot in self.spots if spot.fast]
        elif not grad and self._fast:
            for handle in self._fast:
                handle.remove()
            self._fast = []

    def gave(self, number: int, output: Any) -> None:
        """See :class:`exporter.hooks.modules.ModuleListener`."""
        self._guarded(self._look, number, output)

    def took(self, number: int, given: Any) -> None:
        """See :class:`exporter.hooks.modules.ModuleListener`."""
        self._guarded(self._look, number, given)

    def _look(self, number: int, value: Any) -> None:
        spot = self.spots[number]
        found = self._pass_of(spot.number, spot.module.training)
        given = modules.tensor_of(value)
        if found is None or given is None:
            return
        x = _readable(given)
        observer = self._observer
        if x is None or observer is None:
            return
        self._fired = True
        found.order += 1
        before, found.last = found.last, (spot.number, given) if spot.group == "all" else None
        if spot.group == "residual":
            if observer.sheet.due and before is not None and before[1] is given:
                observer.sheet.host["inside.residual"] = before[0]  # the same tensor: it was read as the block's output
            elif observer.sheet.due:
                found.put("norm", number, _norm(x), x.numel())
            return
        if observer.sheet.due:
            low, high = torch.aminmax(x)
            found.put("low", number, low)
            found.put("high", number, high)
            found.put("norm", number, _norm(x), x.numel())
            self._follow(found, spot, given)
        else:
            found.put("watch", number, _watch(x, spot))
        if spot.number in self._telling and not found.counts and given.requires_grad and not given.is_leaf:
            # On a parameter, it would stay.
            given.register_hook(found.commit)  # type: ignore[no-untyped-call]

    def _pass_of(self, number: int, training: bool) -> Pass | None:
        """Return the open pass, or begin one where a block is called by itself; None where nothing is to be seen."""
        found = self._open
        if found is not None and found.opener is None and (number in found.seen or not self._grad):
            self._close_pass()
            found = None
        if found is None:
            if not self._grad or self._observer is None or self._observer.phase == "evaluation":
                return None
            found = self._open = Pass(len(self._passes), True, training)
            self._keep(found)
        found.seen.add(number)
        return found if found.wanted else None

    def within(self, key: int, training: bool, function: Callable[..., None], *arguments: Any) -> None:
        """See :class:`exporter.routers.Passes`."""
        self._guarded(self._within, key, training, function, arguments)

    def _within(self, key: int, training: bool, function: Callable[..., None], arguments: tuple[Any, ...]) -> None:
        found = self._pass_of(key, training)
        if found is not None:
            function(found, *arguments)

    def beyond(self, function: Callable[..., None], *arguments: Any) -> None:
        """See :class:`exporter.routers.Passes`: of what is said behind the forward, it is the last one."""
        self._guarded(self._beyond, function, arguments)

    def _beyond(self, function: Callable[..., None], arguments: tuple[Any, ...]) -> None:
        found = self._open
        if found is None:
            if not self._grad or self._observer is None or self._observer.phase == "evaluation":
                return
            if not self._passes:
                self._keep(Pass(0, True, True))
            found = self._passes[-1]
        if found.wanted:
            function(found, *arguments)

    def traced_within(self, function: Callable[..., None], *arguments: Any) -> None:
        """See :class:`exporter.routers.Passes`."""
        if self._observer is not None and self._observer.phase != "evaluation":
            self._guarded(function, *arguments, traced=True)

    def _follow(self, found: Pass, spot: Spot, given: Tensor) -> None:
        """Look at the gradient of an output when the backward pass comes by."""
        if given.requires_grad and not given.is_leaf and spot.group != "residual":
            which = (found.number, spot.number)
            step = self._observer.step if self._observer is not None else 0

            def look(gradient: Tensor) -> None:
                self._guarded(self._look_back, step, which, gradient, backward=True)

            given.register_hook(look)  # type: ignore[no-untyped-call]

    def _look_back(self, step: int, which: tuple[int, int], gradient: Tensor) -> None:
        if len(self._grads) >= NUMBERS:
            return  # that many are sent; of the rest the parameters tell
        x = _readable(gradient)
        if x is not None and self._observer is not None and self._observer.step == step:
            self._grads.append(((which[0], len(self._grads), which[1], 0), _watch(x, self.spots[which[1]])))

    def attended(
        self, query: Tensor, key: Tensor, mask: Tensor | None, causal: bool, scale: float | None, output: Tensor
    ) -> None:
        """See :class:`exporter.hooks.attention.AttentionListener`."""
        if self._attending():
            self._guarded(self._attended, query, key, mask, causal, scale, output)

    def _attended(
        self, query: Tensor, key: Tensor, mask: Tensor | None, causal: bool, scale: float | None, output: Tensor
    ) -> None:
        found = self._open
        if found is None or query.ndim < 3 or not query.numel() or not key.numel() or query.dtype not in TYPES:
            return
        query, key = query.detach(), key.detach()
        with torch.autocast(query.device.type, enabled=False) if torch._C._is_any_autocast_enabled() else nullcontext():
            found.put("sampled", -1, sampled(query, key, None if mask is None else mask.detach(), causal, scale))
            largest = log_sum_exp(output, query.shape[-2])
            if largest is not None:
                found.put("lse", -1, largest)
            else:  # both lie above the maximum: the bound further, and at the price of reading queries and keys
                found.put("bound", -1, bound(query, key, scale))

    def weighed(self, scores: Tensor) -> None:
        """See :class:`exporter.hooks.attention.AttentionListener`."""
        if self._attending():
            self._guarded(self._weighed, scores)

    def _weighed(self, scores: Tensor) -> None:
        if self._open is not None and scores.numel() and scores.dtype in TYPES:
            self._open.put("sampled", -1, of_scores(scores.detach()))

    def _attending(self) -> bool:
        found, observer = self._open, self._observer
        return found is not None and found.wanted and observer is not None and observer.sheet.due

    def traced(self, x: Tensor, row: Tensor) -> None:
        """See :class:`exporter.hooks.modules.ModuleListener`."""
        self._guarded(self._traced_one, x, row, traced=True)

    def _traced_one(self, x: Tensor, row: Tensor) -> None:
        observer = self._observer
        if observer is None or observer.phase == "evaluation" or x.device != row.device or x.dtype not in TYPES:
            return
        if not x.numel():
            return
        self._traced = True
        row[0].add_(_sum(x))
        if observer.sheet.due:
            low, high = torch.aminmax(x)
            norm = _norm(x)
            row[1].copy_(torch.maximum(row[1], torch.maximum(high, -low)))
            row[2].add_(norm * norm)
            row[3].add_(x.numel())

    def _guarded(
        self, function: Callable[..., None], *arguments: Any, backward: bool = False, traced: bool = False
    ) -> None:
        """Call a function of ours, unless the forward is one of checkpointing's, or part of something larger.

        ``traced``: by an operator of a graph with gradients, which itself runs without them.
        """
        observer = self._observer
        if observer is None or not observer.active:
            return
        if not backward and torch._C._current_graph_task_id() != -1:
            return
        grad = torch.is_grad_enabled()
        if not backward and not self._on_its_thread(grad or traced):
            return
        began = time.perf_counter()
        self._grad = grad
        try:
            if observing._capturing():
                self._say_replay()
            elif torch._C._functorch.peek_interpreter_stack() is None and torch._C._get_tracing_state() is None:
                with torch.no_grad(), _beside_modes():
                    function(*arguments)
        except Exception as error:
            self._fail("looking into the model", error)
        finally:
            observer.seconds += time.perf_counter() - began

    def _on_its_thread(self, grad: bool) -> bool:
        """Say whether this is the thread that trains. What several did at once would be taken for one pass."""
        here = threading.get_ident()
        if self._thread is None and grad:
            self._thread = here
        if self._thread == here:
            return True
        if grad:
            self._notices.say(
                "threads", "the model is called on another thread than the one that steps: that is not looked into"
            )
        return False

    def _say_replay(self) -> None:
        self._notices.say(
            "graph",
            "a CUDA graph is captured over the model's forward: while it is replayed, only what the trainer hands in "
            "is recorded",
        )

    # The end of the step.

    def take(self, sheet: Sheet) -> None:
        """Put down what was seen since the last step, and begin anew."""
        self._thread = threading.get_ident()
        try:
            self._take(sheet)
        except Exception as error:
            self._fail("what was seen in the model", error)

    def _fail(self, where: str, error: Exception) -> None:
        self._notices.fault(where, error)
        self.detach()

    def _take(self, sheet: Sheet) -> None:
        self._close_pass()
        passes, grads = [one for one in self._passes if one.counts], self._grads
        self._passes, self._grads = [], []
        fired, self._fired = self._fired or self._traced, False
        if self._traced:
            self._traced = False
            on: dict[torch.device, dict[int, Tensor]] = {}  # a model that is cut into stages lies on several
            for number, row in self._rows.items():
                on.setdefault(row.device, {})[number] = row
            for rows in on.values():
                sheet.add("inside.rows", torch.stack(list(rows.values())).reshape(-1), tuple(rows))
                torch._foreach_zero_(list(rows.values()))
        self._note_silence(fired, "updates" in sheet.host)
        self.routers.take(sheet, passes)
        packs = [pack for one in passes for pack in one.packed]
        if sum(len(cells) for _, cells, _ in packs) > NUMBERS:
            packs = folded(packs)
        room = NUMBERS
        for (what, _, _), cells, values in packs:
            room -= len(cells)
            if room >= 0:
                sheet.add(f"inside.{what}", values, cells)
            else:
                self._notices.say("numbers", f"a step's passes gave more than {NUMBERS} numbers: some are left out")
        by_kind: dict[tuple[torch.device, torch.dtype], tuple[list[Cell], list[Tensor]]] = {}
        for cell, value in grads:
            known = by_kind.setdefault((value.device, value.dtype), ([], []))
            known[0].append(cell)
            known[1].append(value)
        for seen, values_ in by_kind.values():
            sheet.add("inside.grad", torch.stack(values_), tuple(seen))

    def _note_silence(self, fired: bool, updated: bool) -> None:
        if fired:
            self._silent = 0
        elif self._silent is None and updated and any(spot.group == "all" for spot in self.spots):
            self._unseen += 1
            if self._unseen == SILENT:
                self._notices.say(
                    "unseen",
                    f"no block of the model was seen in {SILENT} steps that updated it, so activations are absent: make the exporter before "
                    "torch.compile, and of the model that is called",
                )
        elif self._silent is not None:
            self._silent += 1
            if self._silent == SILENT:
                self._notices.say(
                    "silence",
                    "the model's modules were seen before, and in the last steps none was: where a CUDA graph is replayed or the "
                    "model runs elsewhere, only what the trainer hands in is recorded",
                )


def _beside_modes() -> AbstractContextManager[Any]:
    """Whatever takes note of the trainer's operations must not take note of ours.

    Selective checkpointing gives results back in their order, a counter of operations counts them, a tracer writes them down.
    """
    return _disable_current_modes() if torch._C._len_torch_dispatch_stack() else nullcontext()


def _readable(tensor: Tensor) -> Tensor | None:
    """Return what this rank holds of a tensor, None where it is not one of plain numbers."""
    x = local(tensor)
    if type(x) not in (Tensor, nn.Parameter) or x.dtype not in TYPES or x.layout is not torch.strided or not x.numel():
        return None
    return x.detach()


def _norm(x: Tensor) -> Tensor:
    """Return the L2 norm; on a CPU over those of the rows, which is nearer and takes half the time."""
    dtype = accumulation(x)
    rows = torch.linalg.vector_norm(x, dim=-1, dtype=dtype) if x.ndim > 1 and x.device.type == "cpu" else x
    found: Tensor = torch.linalg.vector_norm(rows, dtype=dtype)
    return found


def _watch(x: Tensor, spot: Spot) -> Tensor:
    """Return a number that is finite if a block's tensor is, or, of a smaller part, if one feature of each token is."""
    return _sum(x if spot.group == "all" or x.ndim < 2 else x[..., 0])


def _sum(x: Tensor) -> Tensor:
    """Return a sum that is finite if all of ``x`` is (and no single value is near the end of its type's range)."""
    return x.sum(dtype=torch.float32 if x.dtype is torch.float16 else x.dtype)
