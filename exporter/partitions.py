"""What lies where in the tensors that DeepSpeed's optimizers update in the place of a model's parameters, and those updates by parameter.

Under ZeRO they are flat partitions in float32, one for each group of parameters or several; without it copies, one by one or end to end.
DeepSpeed remembers which elements belong to which parameter. It is asked for that here, so that what a rank measures of them goes by
parameter and group. Reads attributes alone: no tensor is gathered, no value on a device read, DeepSpeed not imported.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from .observer import Observer
from .probes.probe import Update
from .watched import Told, Watched

#: What DeepSpeed adds to a norm before it divides by it, when it clips (its unscale_and_clip_grads and clip_tensors_by_global_norm).
EPSILON = 1e-6


@dataclass(slots=True, eq=False)
class Piece:
    """The elements of one parameter in a partition: ``count`` from ``start`` on; all of it, in its own shape, where None."""

    parameter: Tensor
    tensor: Tensor
    start: int = 0
    count: int | None = None

    def of(self, flat: Tensor) -> Tensor:
        """Return these elements of a tensor that lies as the partition does."""
        return flat.detach() if self.count is None else flat.detach().narrow(0, self.start, self.count)


@dataclass(slots=True, eq=False)
class Partition:
    """A tensor that the optimizer updates, the number of its group, and how many ranks hold the same."""

    flat: Tensor
    group: int
    holders: int = 1
    pieces: list[Piece] = field(default_factory=list)

    def add(self, parameter: Tensor, start: int = 0, count: int | None = None) -> None:
        """Note that elements of ``parameter`` lie here; none of them is nothing to note."""
        piece = Piece(parameter, self.flat, start, count)
        if count is None or count > 0:
            piece.tensor = piece.of(self.flat)
            self.pieces.append(piece)


class FlatUpdates:
    """Shows the updates of partitions to the probes as updates of pieces of parameters.

    DeepSpeed has its optimizer step once for each group, or part of one, in a step of the engine, with the gradients of that group
    alone, clipped: what they were multiplied by for it is told along. ``stand_in`` is the optimizer that the probes are shown.
    """

    def __init__(self, wrapped: Any, base: Any, partitions: Sequence[Partition]) -> None:
        self._wrapped = wrapped
        self._base = base
        self.partitions = list(partitions)
        self.stand_in = stand_in_for(base, partitions)
        self._known = {id(partition.flat): partition for partition in partitions}
        #: The numbers of the groups, by what was in them at attach.
        self._numbers = {id(flat): at for at, group in enumerate(base.param_groups) for flat in group["params"]}
        self._numbers.update({id(partition.flat): partition.group for partition in partitions})
        self._depth = 0
        self._update: Update | None = None

    def attach(self, observer: Observer, watched: Watched) -> Callable[[], None]:
        """Begin to listen, and return what ends it. Before a plan's hooks on the rate: those put it back behind these."""
        self._observer, self._watched = observer, watched
        handles = [
            self._base.register_step_pre_hook(self._before),
            self._base.register_step_post_hook(self._after),
        ]

        def detach() -> None:
            for handle in handles:
                handle.remove()

        return detach

    def _before(self, *_: Any) -> None:
        self._depth += 1
        if self._depth == 1:  # a subclass's step may run that of torch inside
            self._observer._guarded(self._open)

    def _after(self, *_: Any) -> None:
        self._depth = max(0, self._depth - 1)
        if self._depth == 0:
            self._observer._guarded(self._close)

    def broken_off(self) -> None:
        """The engine's step is over, whether or not the optimizer's was."""
        self._depth, self._update = 0, None

    def _here(self) -> Iterator[Partition]:
        """Yield the partitions that the optimizer is about to update, and let the group of each be as it is now."""
        own = self.stand_in.param_groups
        for at, group in enumerate(self._base.param_groups):
            for flat in group["params"]:
                number = self._numbers.get(id(flat), at if len(own) == len(self._base.param_groups) else None)
                if number is not None:
                    own[number].update({name: value for name, value in group.items() if name != "params"})
                partition = self._known.get(id(flat))
                if partition is not None:
                    yield partition

    def _open(self) -> None:
        sheet = self._observer.sheet
        pieces: list[Tensor] = []
        gradients: list[Tensor] = []
        for partition in self._here():
            if partition.flat.grad is not None:
                pieces += [piece.tensor for piece in partition.pieces]
                gradients += [piece.of(partition.flat.grad) for piece in partition.pieces]
        indices = [self._watched.index_of(piece) for piece in pieces]
        self._update = Update(self.stand_in, sheet, self._watched, pieces, gradients, indices, self._clipped_to())
        sheet.host["updates"] = 1
        self._observer._show("before", self._update, due=sheet.due)

    def _clipped_to(self) -> Tensor | None:
        """Return what the gradients were multiplied by to clip them, None where nothing was."""
        norm, clip = norm_of(self._wrapped), threshold_of(self._wrapped)
        if norm is None or clip is None:
            return None
        return torch.clamp(clip / (torch.as_tensor(norm).detach() + EPSILON), max=1.0).reshape(())

    def _close(self) -> None:
        update, self._update = self._update, None
        if update is None:
            return
        state = self.stand_in.state
        state.clear()
        for partition in self._here():
            own = self._base.state.get(partition.flat, {})
            # In most steps the counter alone is asked for.
            for piece in partition.pieces if update.sheet.due else partition.pieces[:1]:
                state[piece.tensor] = {
                    name: piece.of(value) if _alike(value, partition.flat) else value for name, value in own.items()
                }
        if not self._known and "optimizer_step" not in update.sheet.host:
            count = count_of(self._base)
            update.sheet.host["optimizer_step"] = count if isinstance(count, int) else True
            if not isinstance(count, int):
                update.sheet.add("optimizer_step", count.reshape(()))
        self._observer._show("after", update, due=update.sheet.due)
        state.clear()


def partitions_of(engine: Any) -> tuple[list[Partition], str | None]:
    """Return what the engine's optimizer updates, and why that cannot be told. Both are empty where it updates the model's own parameters."""
    wrapped = engine.optimizer
    if wrapped is engine.basic_optimizer:
        return [], None
    kinds = class_names(wrapped)
    try:
        if "DeepSpeedZeroOptimizer_Stage3" in kinds:
            found = _of_stage_3(wrapped)
        elif "DeepSpeedZeroOptimizer" in kinds:
            flats = wrapped.single_partition_of_fp32_groups
            found = _of_fragments(wrapped.bit16_groups, flats, wrapped.real_dp_process_group)
        elif "BF16_Optimizer" in kinds:
            flats = wrapped.fp32_groups_flat_partition
            found = _of_fragments(wrapped.bf16_groups, flats, wrapped.real_dp_process_group)
        elif "FP16_UnfusedOptimizer" in kinds:
            found = _of_copies(wrapped.fp16_groups, wrapped.fp32_groups)
        elif "FP16_Optimizer" in kinds:
            found = _of_whole_groups(wrapped.fp16_groups, wrapped.fp32_groups_flat)
        else:
            return [], f"it is not known what a {type(wrapped).__name__} updates"
    except (AttributeError, TypeError, KeyError, RuntimeError) as error:
        return [], f"{type(wrapped).__name__} of this DeepSpeed does not tell where parameters lie: {error}"
    pairs = [
        (piece.parameter.device.type, partition.flat.device.type) for partition in found for piece in partition.pieces
    ]
    if any(model != state for model, state in pairs) or is_swapped(engine):
        return [], "the optimizer's state is offloaded, and to measure it there would hold the step up"
    return found, None


def _of_fragments(
    groups: Sequence[Sequence[Any]], flats: Sequence[Tensor], process_groups: Sequence[Any]
) -> list[Partition]:
    """ZeRO 1 and 2: each parameter knows its fragment of this rank's partition, if it has one."""
    found = []
    for number, (members, flat) in enumerate(zip(groups, flats, strict=True)):
        partition = Partition(flat, number, _world() // dist.get_world_size(process_groups[number]))
        for parameter in members:
            mapping = parameter._hp_mapping
            if mapping is not None:
                address = mapping.get_hp_fragment_address()
                partition.add(parameter, int(address.start), int(address.numel))
        found.append(partition)
    return found


def _of_stage_3(wrapped: Any) -> list[Partition]:
    """ZeRO 3: every parameter is cut into as many equal parts as its group has ranks, the last of them padded."""
    found = []
    flats = wrapped.fp32_partitioned_groups_flat
    for number, (members, flat) in enumerate(zip(wrapped.fp16_groups, flats, strict=True)):
        among = getattr(members[0], "ds_process_group", wrapped.dp_process_group)  # under MiCS fewer than all
        rank, ranks = dist.get_rank(among), dist.get_world_size(among)
        partition = Partition(flat, int(wrapped.sub_group_to_group_id[number]), _world() // ranks)
        for parameter in members:
            _, start, size = wrapped.grad_position[wrapped.get_param_id(parameter)]
            partition.add(parameter, int(start), max(0, min(int(size), int(parameter.ds_numel) - rank * int(size))))
        found.append(partition)
    return found


def _of_copies(groups: Sequence[Sequence[Tensor]], copies: Sequence[Sequence[Tensor]]) -> list[Partition]:
    """Without ZeRO, unfused: a copy of each parameter in float32, the same on all ranks."""
    found = []
    for number, (members, own) in enumerate(zip(groups, copies, strict=True)):
        for parameter, copy in zip(members, own, strict=True):
            found.append(Partition(copy, number, _world()))
            found[-1].add(parameter)
    return found


def _of_whole_groups(groups: Sequence[Sequence[Tensor]], flats: Sequence[Tensor]) -> list[Partition]:
    """Without ZeRO, fused: all copies of a group end to end, the same on all ranks."""
    found = []
    for number, (members, flat) in enumerate(zip(groups, flats, strict=True)):
        partition, start = Partition(flat, number, _world()), 0
        for parameter in members:
            partition.add(parameter, start, parameter.numel())
            start += parameter.numel()
        found.append(partition)
    return found


def told_of(engine: Any, partitions: Sequence[Partition], why: str | None) -> Told:
    """Return what the exporter has to know of them: names, and how often each counts in a sum over the ranks."""
    pieces = [(piece, partition.holders) for partition in partitions for piece in partition.pieces]
    reason = why if _world() > 1 else None
    if reason is None and _world() > 1 and getattr(engine, "mp_world_size", 1) > 1:
        reason = "under model parallelism it is not told which ranks hold the same"
    if reason is None and _world() > 1 and getattr(engine, "has_moe_layers", False):
        reason = "experts are partitioned over fewer ranks than the rest"
    split = any(holders < _world() for _, holders in pieces) or engine.zero_optimization_stage() > 0
    return Told(
        stand_ins=[(piece.tensor, piece.parameter) for piece, _ in pieces],
        weights=[(piece.tensor, 1.0 / holders) for piece, holders in pieces] if split else None,
        untold=reason,
    )


def stand_in_for(base: Any, partitions: Sequence[Partition]) -> Any:
    """Return an optimizer of the same kind whose parameters are the pieces. It is shown to probes, and never stepped."""
    kind = type(base)
    members: dict[int, list[Tensor]] = defaultdict(list)
    for partition in partitions:
        members[partition.group] += [piece.tensor for piece in partition.pieces]
    groups = [{**group, "params": members[number]} for number, group in enumerate(base.param_groups)]
    own: Any = type(kind.__name__, (kind,), {"__module__": kind.__module__, "__del__": lambda self: None})
    made = own.__new__(own)
    torch.optim.Optimizer.__init__(made, groups, dict(base.defaults))
    return made


def is_swapped(engine: Any) -> bool:
    """Say whether the optimizer keeps its state in files."""
    return bool(engine.zero_nvme_offload_optimizer())


def class_names(thing: Any) -> set[str]:
    """Return the names of a thing's classes: what is told by them need not be imported."""
    return {kind.__name__ for kind in type(thing).__mro__}


def _world() -> int:
    return dist.get_world_size() if dist.is_initialized() else 1


def _alike(value: Any, flat: Tensor) -> bool:
    return isinstance(value, Tensor) and value.shape == flat.shape


def norm_of(wrapped: Any) -> Any:
    """Return the norm before clipping that DeepSpeed took of the whole gradient in its last step, or None.

    It is what ``engine.get_global_gradnorm_of()`` gives, but for the unfused optimizer, which keeps the one of the scaled gradient.
    """
    norm = getattr(wrapped, "_global_grad_norm", None)
    if norm is not None and "FP16_UnfusedOptimizer" in class_names(wrapped):
        return norm / wrapped.loss_scale_config.cur_scale
    return norm


def threshold_of(wrapped: Any) -> float | None:
    """Return the norm that the engine clips at, or None."""
    clip = getattr(wrapped, "clip_grad", None)
    return float(clip) if isinstance(clip, int | float) and clip > 0 else None


def count_of(base: Any) -> Any:
    """Return the optimizer's own count of steps: a tensor where it is on the device, 0 where it has none yet."""
    counts = [state["step"] for state in base.state.values() if "step" in state]
    counts += [group["step"] for group in base.param_groups if "step" in group]
    if not counts:
        return 0
    first = counts[0]
    return int(first) if not isinstance(first, Tensor) or first.device.type == "cpu" else first.detach().clone()
