"""A rank's own gradient before it is reduced over the ranks, by listening in on the backward pass.

Under DDP nothing is registered with the reducer. It has room for one communication hook, which can never be taken out again and
which the trainer may want for itself (bf16 or fp16 compression, PowerSGD), and with a hook of Python's it divides gradients by
other arithmetic than without. Autograd calls a parameter's own hook after its gradient was accumulated and before the reducer
takes it, whatever the reducer does then. So the first of a backward pass's gradients asks to be called back at its end: that is
before the reducer, which asks when the last gradient is there, waits for the others and writes the averaged gradients. Where
gradients are views of the buckets (``gradient_as_bucket_view``) they are summed up by then, so each is looked at as it comes,
in the steps that are due.

Under FSDP2 the reduce-scatter of a module is a part that the user may choose (``set_custom_reduce_scatter``). The one that
is there by default is followed by one that takes the norm of what goes in and then does the same.

Left out, and said once: DDP with mixed precision of its own, with delayed or compiled reduction, reentrant checkpointing; FSDP2
modules with a reduce-scatter of the trainer's.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.autograd import Variable
from torch.nn.parallel import DistributedDataParallel

from trainwarden.exporter.measure import norms
from trainwarden.exporter.watched import as_numbers

#: What a norm is of: ``("pass", n)`` all that DDP module n has accumulated, so that a step's last one counts; ``("part", n)`` what
#: FSDP2 module n reduces of one backward pass.
Source = tuple[str, int]


class GradientListener(Protocol):
    """Who wants to know. None of these may raise."""

    @property
    def due(self) -> bool:
        """Whether the step is one in which costly things are looked at."""

    def own_gradient(self, source: Source, norm: Callable[[], Tensor | None]) -> None:
        """The gradients of ``source`` are there and not reduced yet; ``norm`` returns their L2 norm."""

    def own_gradient_unknown(self) -> None:
        """What was told of this step's gradients is not to be relied on."""

    def own_backward_over(self) -> None:
        """This rank's own backward pass is over on the host, and it waits for the others next."""


class Handle:
    """Takes back what was hooked."""

    def __init__(self, undo: Callable[[], None]) -> None:
        self._undo = undo

    def remove(self) -> None:
        """Listen no more."""
        self._undo()


def listen(model: nn.Module, listener: GradientListener, say: Callable[[str, str], None]) -> list[Any]:
    """Tell ``listener`` of the gradients that ``model`` has on this rank before they are reduced, and return handles.

    ``say(what, sentence)`` is told what is left out. Nothing is hooked where the model is neither DDP nor FSDP2.
    """
    wrapped = [module for module in model.modules() if isinstance(module, DistributedDataParallel)]
    handles: list[Any] = []
    for source, ddp in enumerate(wrapped):
        reason = _refused(ddp)
        if reason:
            say("own gradients", f"rank_grad_norm is left out: {reason}")
            continue
        handles += _Backward(ddp, source, listener, say).attach()
    if not wrapped:
        handles += _listen_to_fsdp(model, listener, say)
    return handles


def norm_of(gradients: Sequence[Tensor]) -> Tensor | None:
    """Return the L2 norm over some dense tensors, summed in float32 or better; None where there is none."""
    dense = [as_numbers(gradient) for gradient in gradients]
    dense = [gradient for gradient in dense if gradient.layout is torch.strided and gradient.numel()]
    return _together([each for _, each in norms(dense, range(len(dense)))])


def _together(pieces: Sequence[Tensor]) -> Tensor | None:
    """Return the norm over norms; those of other devices join the first one's only where all are on one."""
    if not pieces:
        return None
    if len({piece.device for piece in pieces}) > 1:
        return None
    kind = torch.float64 if any(piece.dtype is torch.float64 for piece in pieces) else torch.float32
    found: Tensor = torch.linalg.vector_norm(torch.cat([piece.reshape(-1).to(kind) for piece in pieces]))
    return found


def _refused(ddp: DistributedDataParallel) -> str:
    """Say why a DDP module is not listened to, or return an empty text."""
    if getattr(ddp, "mixed_precision", None) is not None:
        return "DDP casts parameters and gradients by itself (mixed_precision)"
    if getattr(ddp, "_delay_all_reduce_params", None):
        return "DDP delays the reduction of some parameters"
    if getattr(ddp, "_use_python_reducer", False):
        return "DDP reduces inside of compiled autograd"
    return ""


class _Backward:
    """Listens to the backward passes of one DDP module."""

    def __init__(
        self, ddp: DistributedDataParallel, source: int, listener: GradientListener, say: Callable[[str, str], None]
    ) -> None:
        self._ddp = ddp
        self._source: Source = ("pass", source)
        self._listener = listener
        self._say = say
        self._params = [parameter for parameter in ddp.module.parameters() if parameter.requires_grad]
        self._views = bool(getattr(ddp, "gradient_as_bucket_view", False))
        self._host = all(parameter.device.type == "cpu" for parameter in self._params)
        self._task = self._newest = -1
        self._asked = False
        self._looks = False
        self._each: list[Tensor] = []
        self._off = False
        # The first pass of a static graph is reduced before anything that could be asked for now.
        self._first = bool(getattr(ddp, "static_graph", False)) and not getattr(
            ddp, "_static_graph_delay_allreduce_enqueued", True
        )

    def attach(self) -> list[Any]:
        return [parameter.register_post_accumulate_grad_hook(self._accumulated) for parameter in self._params]

    def _accumulated(self, parameter: Tensor) -> None:
        """A gradient is there. Called once for each parameter and backward pass: what is usual returns at once."""
        task = torch._C._current_graph_task_id()
        if self._asked and task == self._task:
            if self._looks:
                self._look_at(parameter)
            return
        if self._off or not self._ddp.require_backward_grad_sync or torch.compiler.is_compiling():
            return
        # Tasks are numbered as they begin: back in an older one, the other ran inside of it. A task that never ended has failed.
        if task < self._newest:
            self._nested()
            return
        self._asked, self._task, self._newest = True, task, task
        self._each = []
        self._looks = self._views and self._listener.due
        Variable._execution_engine.queue_callback(lambda: self._over(task))
        if self._looks:
            self._look_at(parameter)

    def _nested(self) -> None:
        self._off = True
        self._listener.own_gradient_unknown()
        self._say("own gradients", "rank_grad_norm is left out: backward passes are nested (reentrant checkpointing)")

    def _look_at(self, parameter: Tensor) -> None:
        gradient = parameter.grad
        if gradient is not None:
            self._listener.own_gradient(("pass", -1), lambda: self._keep(gradient))

    def _keep(self, gradient: Tensor) -> None:
        norm = norm_of([gradient])
        if norm is not None:
            self._each.append(norm)

    def _over(self, task: int) -> None:
        """All gradients of the pass are there, and none is averaged yet, unless they are views of the buckets."""
        self._asked = False
        each, self._each = self._each, []
        if self._off:
            return
        if task < self._newest:
            self._nested()
            return
        if self._first:
            self._first = False
            return
        if self._host:
            self._listener.own_backward_over()
        if self._looks:
            self._listener.own_gradient(self._source, lambda: _together(each))
        elif not self._views:
            gradients = [parameter.grad for parameter in self._params if parameter.grad is not None]
            self._listener.own_gradient(self._source, lambda: norm_of(gradients))


def _listen_to_fsdp(model: nn.Module, listener: GradientListener, say: Callable[[str, str], None]) -> list[Any]:
    """Have each FSDP2 module reduce through a reduce-scatter that looks at what goes in."""
    fsdp = sys.modules.get("torch.distributed.fsdp")  # a model that is sharded by it has imported it
    kind = getattr(fsdp, "FSDPModule", None)
    modules = [] if kind is None else [module for module in model.modules() if isinstance(module, kind)]
    if not modules:
        return []
    from torch.distributed.fsdp._fully_shard._fsdp_collectives import DefaultReduceScatter

    class Looking(DefaultReduceScatter):  # type: ignore[misc, unused-ignore]
        """What FSDP2 does by default, behind a look at what goes in."""

        def __init__(self, source: int) -> None:
            super().__init__()
            self._source: Source = ("part", source)

        def __call__(self, output_tensor: Tensor, input_tensor: Tensor, *args: Any, **kwargs: Any) -> Any:
            # Anything but these two was divided before by a number that is not known here.
            if input_tensor.dtype in (torch.float32, torch.bfloat16) and not torch.compiler.is_compiling():
                listener.own_gradient(self._source, lambda: norm_of([input_tensor]))
            return super().__call__(output_tensor, input_tensor, *args, **kwargs)

    handles: list[Any] = []
    for source, module in enumerate(modules):
        groups = _param_groups(module)
        if not groups:
            continue
        if len(groups) > 1 or type(groups[0]._reduce_scatter_comm) is not DefaultReduceScatter:
            say("own gradients", "rank_grad_norm is left out: a module of the model has a reduce-scatter of its own")
            for handle in handles:
                handle.remove()
            return []
        looking = Looking(source)
        module.set_custom_reduce_scatter(looking)
        handles.append(Handle(lambda group=groups[0], looking=looking: _put_back(group, looking, DefaultReduceScatter)))  # type: ignore[misc]
    return handles


def _param_groups(module: Any) -> list[Any]:
    """Return a module's groups of sharded parameters: none where its children own all of them."""
    state = module._get_fsdp_state()
    groups = getattr(state, "_fsdp_param_groups", None)
    if groups is None:
        group = getattr(state, "_fsdp_param_group", None)
        groups = [] if group is None else [group]
    return list(groups)


def _put_back(group: Any, looking: Any, default: Callable[[], Any]) -> None:
    if group._reduce_scatter_comm is looking:
        group._reduce_scatter_comm = default()
