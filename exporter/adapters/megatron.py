"""Megatron-core: an exporter for a loop of one's own around ``forward_backward_func`` and a ``MegatronOptimizer``.

What ``optimizer.step()`` finds out anyway is taken from it: the norm over all ranks before it clips, zeros, loss scale, whether the
update was skipped. Norms by group are those of the tensors that its inner optimizers update, before clipping; Megatron's own marks
say which rank's copy counts. Nothing here issues a collective or raises into the loop.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import num_microbatches_calculator, parallel_state
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from megatron.core.optimizer.optimizer import (
    ChainedOptimizer,
    Float16OptimizerWithFloat16Params,
    FP32Optimizer,
    MegatronOptimizer,
)
from megatron.core.tensor_parallel import VocabParallelEmbedding, param_is_not_tensor_parallel_duplicate
from megatron.core.transformer.module import param_is_not_shared
from torch import Tensor, nn

from trainwarden.exporter.drain import Call
from trainwarden.exporter.exporter import Exporter
from trainwarden.exporter.hooks import clipping
from trainwarden.exporter.hooks.replaced import go_through
from trainwarden.exporter.loader.counted import CountedSamples
from trainwarden.exporter.watched import Told
from trainwarden.names import own_name
from trainwarden.signals import BY_NAME

#: Optimizers whose parts are known: which tensor stands for which parameter, and on how many ranks.
KNOWN = (FP32Optimizer, Float16OptimizerWithFloat16Params, DistributedOptimizer)
#: Where each of them keeps model parameters, and what it updates in their place.
PAIRS = (
    ("float16_groups", "fp32_from_float16_groups"),
    ("model_float16_groups", "shard_fp32_from_float16_groups"),
    ("model_fp32_groups", "shard_fp32_groups"),
)
#: The file in which Megatron-LM writes the iteration of the newest whole checkpoint (checkpointing.py).
TRACKER = "latest_checkpointed_iteration.txt"
#: Why a plan's skips are not carried out.
WHY = "Megatron's samplers go by the number of consumed samples alone"


def attach(
    model: nn.Module | Sequence[nn.Module],
    optimizer: MegatronOptimizer,
    run: str | None = None,
    *,
    micro_batch_size: int | None = None,
    dataset: str | None = None,
    **settings: Any,
) -> MegatronExporter:
    """Watch a loop of Megatron's kind. Call it on every rank, behind ``get_megatron_optimizer``.

    Example::

        optimizer = get_megatron_optimizer(config, model)
        exporter = attach(model, optimizer, run="gpt-7b")
        ...
            losses_reduced = forward_backward_func(...)
            update_successful, grad_norm, num_zeros = optimizer.step()
            ...
            consumed_samples += global_batch_size
            exporter.step(losses_reduced, consumed_samples=consumed_samples)  # closes a record, also of a skipped update

    Args:
        model: the model, or the list of its chunks that ``get_model`` returned.
        optimizer: what ``get_megatron_optimizer`` returned.
        run: the run's display name; it names its folder.
        micro_batch_size: samples of one rank in a micro-batch, by which a step's samples are those of a rank; default what
            Megatron's ``num_microbatches_calculator`` was set up with.
        dataset: the data set's name.
        settings: what else :class:`Exporter` takes.

    Raises:
        TypeError, ValueError: an argument is of no use; the message names it.
    """
    return MegatronExporter(model, optimizer, run, micro_batch_size=micro_batch_size, dataset=dataset, **settings)


class MegatronExporter(Exporter):
    """An :class:`Exporter` that takes what a ``MegatronOptimizer`` says of its steps. See :func:`attach`."""

    def __init__(
        self,
        model: nn.Module | Sequence[nn.Module],
        optimizer: MegatronOptimizer,
        run: str | None = None,
        *,
        micro_batch_size: int | None = None,
        dataset: str | None = None,
        **settings: Any,
    ) -> None:
        if not isinstance(optimizer, MegatronOptimizer):
            raise TypeError(f"optimizer: {type(optimizer).__name__} is no MegatronOptimizer of megatron.core")
        chunks = [model] if isinstance(model, nn.Module) else list(model)
        strange = [type(chunk).__name__ for chunk in chunks if not isinstance(chunk, nn.Module)]
        if strange or not chunks:
            raise TypeError(f"model: {', '.join(strange) or 'an empty list'} is no torch.nn.Module, nor a list of some")
        if micro_batch_size is not None and (type(micro_batch_size) is not int or micro_batch_size < 1):
            raise ValueError(f"micro_batch_size: {micro_batch_size!r} is no positive whole number")
        self._megatron = optimizer
        self._each = _flat(optimizer)
        self._place = _place()
        self._saving: list[tuple[int, Path, str | None, Future[None]]] = []
        self._undo: list[Callable[[], None]] = []
        inner = [one.optimizer for one in self._each]
        try:
            self._told = _told(self._each)
        except Exception as error:  # a release of Megatron that keeps its parts otherwise
            self._told = Told(untold=f"Megatron's optimizer is not understood: {type(error).__name__}: {error}")
        whole = chunks[0] if len(chunks) == 1 else nn.ModuleList(chunks)
        super().__init__(whole, inner or [_none()], run, **settings)
        if not inner:
            self._notices.say("frozen", "this rank trains no parameter: its records have no norms and no rates")
        size = _micro_batch_size() if micro_batch_size is None else micro_batch_size
        reads = self._place.get("data", (0, dist.get_world_size() if dist.is_initialized() else 1))
        followed = self.follow(lambda skips: CountedSamples(skips, size, reads, self._reads, dataset, WHY))
        self._samples = followed if isinstance(followed, CountedSamples) else None
        if self._parts is not None:
            self._quietly("attaching", self._attach, chunks)

    @property
    def _reads(self) -> bool:
        """Whether this rank stands for those of its replica that read the same samples."""
        return all(self._place.get(name, (0, 1))[0] == 0 for name in ("tensor", "pipeline", "context"))

    # What a loop calls.

    def step(self, loss: Any = None, *, consumed_samples: int | None = None) -> None:
        """Close the step's record: call it once per ``optimizer.step()``, successful or not.

        Args:
            loss: the list that ``forward_backward_func`` returned, one dictionary a micro-batch, of which the first entry is the
                loss: (sum, tokens), added up over the micro-batches, or one number, averaged. Empty or None on ranks that do not own
                the loss. Or the dictionary of losses that Megatron-LM's ``train_step`` has reduced over the ranks; or a loss. Further
                entries become signals of the same name.
            consumed_samples: how many samples all ranks have consumed after this step, as Megatron counts them
                (``args.consumed_train_samples``): the position in the data set's order.
        """
        parts = self._live()
        if parts is None:
            super().step()
            return
        if consumed_samples is not None and self._samples is not None:
            self._quietly("sample positions", self._samples.consume, consumed_samples)
        number = loss
        if not isinstance(loss, Tensor | float | int):
            number = self._quietly("losses", self._loss, loss)
        super().step(number)
        if self._saving:
            parts.drain.submit(Call(self._look_for_saved))

    def batch(self, input_ids: Any, labels: Any = None, attention_mask: Any = None, *, source: Any = None) -> None:
        """See :meth:`Exporter.batch`. Of ranks that read the same batch, one takes it: call it on all."""
        if self._reads:
            super().batch(input_ids, labels, attention_mask, source=source)

    def resumed(self, step: int, *, consumed_samples: int | None = None) -> None:
        """Say that the state after iteration ``step`` is loaded, and how many samples were consumed by then. See :meth:`Exporter.resumed`."""
        if self._samples is not None and consumed_samples is not None:
            self._quietly("sample positions", self._samples.place, consumed_samples)
        super().resumed(step)

    def iteration_to_load(self, folder: str | Path) -> int | None:
        """Return the iteration to load out of ``folder``: what a plan names, else the newest that was not given up; None: a new run.

        For ``--ckpt-step``. Megatron's tracker file names the newest, also of a line that a plan has given up.
        """
        target = self.resume()
        if target is None:
            return None
        if Path(target.path).absolute() != checkpoint_path(folder, target.step).absolute():
            self._notices.say("target", f"{target.path} is to be loaded, which is no checkpoint in {folder}")
            return None
        return target.step

    def saved(self, iteration: int, folder: str | Path, request: Any = None) -> None:
        """Report that ``folder/iter_NNNNNNN`` is written, or being written: call it behind ``save_checkpoint``, on every rank.

        It is complete once Megatron's tracker file names the iteration, which is looked at as steps go by; or once ``request``, the
        ``AsyncRequest`` that ``dist_checkpointing.save`` returned and that is not scheduled yet, is finalised.
        """
        if self._live() is None:
            return
        path, done = checkpoint_path(folder, iteration), Future[None]()
        if request is not None:
            request.add_finalize_fn(lambda: done.set_result(None))
        elif _tracked(Path(folder)) == str(iteration):
            done.set_result(None)
        else:
            self._saving.append((iteration, Path(folder), _tracked(Path(folder)), done))
        self.checkpoint(iteration, path, future=done)

    def close(self, reason: str = "finished", code: int | None = 0) -> None:
        """See :meth:`Exporter.close`. The optimizer is as it was."""
        undo, self._undo = self._undo, []
        for one in undo:
            self._quietly("letting go of the optimizer", one)
        if self._saving and (parts := self._live()) is not None:
            parts.drain.submit(Call(self._look_for_saved))
        super().close(reason, code)

    # How it works.

    def _quietly(self, what: str, function: Callable[..., Any], *args: Any) -> Any:
        """Let no fault of ours reach the loop."""
        try:
            return function(*args)
        except Exception as error:
            self._notices.fault(f"Megatron: {what}", error)
            return None

    def _attach(self, chunks: list[nn.Module]) -> None:
        assert self._parts is not None
        self._parts.fields["parallel"] = {name: list(place) for name, place in self._place.items()} or None
        self._parts.fields["loss_scaling"] = self._scaler() is not None
        self._parts.watched.vocabulary = _vocabulary(chunks)
        config = self._megatron.config
        if getattr(config, "use_precision_aware_optimizer", False):
            self._notices.say(
                "precision-aware",
                "the precision-aware optimizer keeps gradients and weights where torch has none: norms by group, weights and updates "
                "are absent",
            )
        self._parts.observer.clips = config is not None and config.clip_grad > 0
        self._listen("prepare_grads", self._prepared)
        self._listen("get_grad_norm", self._normed)
        self._listen("clip_grad_norm", self._normed)
        self._listen("step", self._stepped)

    def _scaler(self) -> Any:
        """Return the scaler of losses, which all optimizers share; None where there is none."""
        return next((found for one in self._each if (found := getattr(one, "grad_scaler", None)) is not None), None)

    def _listen(self, name: str, around: Callable[..., Any]) -> None:
        """Have a method of this one optimizer go through ``around``."""
        self._undo.append(go_through(self._megatron, name, around))

    def _prepared(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Gradients are reduced, in full precision and without loss scale, and not clipped yet."""
        found_inf = original(*args, **kwargs)
        parts = self._live()
        if parts is not None and not found_inf:
            parts.observer.gradients_ready(self._updated())
        return found_inf

    def _updated(self) -> list[Tensor]:
        """Return the tensors that the inner optimizers update."""
        groups = [group for one in self._each for group in one.optimizer.param_groups]
        return [parameter for group in groups for parameter in group["params"]]

    def _normed(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        total = original(*args, **kwargs)
        parts = self._live()
        if parts is not None and total is not None:
            limit = self._megatron.config.clip_grad
            parts.observer.norm_taken(total, limit if limit > 0 else None)
            self._quietly("a norm", self._tell_guards, total, limit if limit > 0 else math.inf, parts.observer)
        return total

    def _tell_guards(self, total: Any, limit: float, observer: Any) -> None:
        updated = [parameter for parameter in self._updated() if parameter.grad is not None]
        if updated:
            place = updated[0].grad.device  # type: ignore[union-attr]
            known = total if isinstance(total, Tensor) else torch.full((), total, dtype=torch.float64, device=place)
            clipping.clipped_elsewhere(updated, limit, known, observer)

    def _stepped(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        scaler = self._scaler()
        before = None if scaler is None else scaler.scale.detach().clone()
        answer = original(*args, **kwargs)
        parts = self._live()
        if parts is not None:
            self._quietly("a step of the optimizer", self._take, parts.observer, answer, scaler, before)
        return answer

    def _take(self, observer: Any, answer: Any, scaler: Any, before: Tensor | None) -> None:
        is_made, _, zeros = answer
        if before is not None:
            observer.trainer_scaled(before, scaler.scale, not is_made)
        if zeros is not None and self._megatron.config.log_num_zeros_in_grad:
            self._log("num_zeros", zeros)

    def _log(self, name: str, value: Any) -> None:
        """Record a number under a name of the loop's own, where the exporter has none of that name."""
        assert self._parts is not None
        own, sheet = own_name(name), self._parts.observer.sheet
        if own in BY_NAME:
            own = f"log_{own}"
        if isinstance(value, Tensor):
            sheet.add("logged", value.detach().clone(), own)
        else:
            sheet.host.setdefault("logged", {})[own] = float(value)

    def _loss(self, given: Any) -> Tensor | None:
        """Return the loss of what a loop has of it, and record what else is in it."""
        if not given:
            return None
        reduced = isinstance(given, Mapping)
        micro = [given] if reduced else list(given)
        with torch.no_grad():
            found = {name: _mean([one[name] for one in micro]) for name in micro[0]}
        (_, loss), *others = found.items()
        for name, value in others:
            self._log(str(name), value)
        if reduced and self._parts is not None:
            self._parts.observer.sheet.host["loss.reduced"] = True
        return loss

    def _look_for_saved(self) -> None:
        """See whether saves are complete by now. Drain thread: a file system may be slow."""
        for entry in tuple(self._saving):
            iteration, folder, known, done = entry
            now = _tracked(folder)
            # Saves end in their order. A number that was there before may be one of a line that was given up.
            if now == str(iteration) or (now != known and now is not None and now.isdigit() and int(now) > iteration):
                self._saving.remove(entry)
                done.set_result(None)


def checkpoint_path(folder: str | Path, iteration: int) -> Path:
    """Return where Megatron-LM keeps the checkpoint of an iteration (``get_checkpoint_name``)."""
    return Path(folder) / f"iter_{iteration:07d}"


def _tracked(folder: Path) -> str | None:
    """Return what the tracker file says, or None."""
    try:
        return (folder / TRACKER).read_text().strip()
    except OSError:
        return None


def _flat(optimizer: MegatronOptimizer) -> list[MegatronOptimizer]:
    """Return the optimizers that update something."""
    if isinstance(optimizer, ChainedOptimizer):
        return [one for each in optimizer.chained_optimizers for one in _flat(each)]
    return [] if getattr(optimizer, "is_stub_optimizer", False) else [optimizer]


def _none() -> torch.optim.Optimizer:
    """Return an optimizer of nothing: a rank of a frozen part is a rank like the others."""
    return torch.optim.SGD([{"params": []}], lr=0.0)


def _told(each: Sequence[MegatronOptimizer]) -> Told:
    """Return what stands for which parameter in these optimizers, and which of it counts on this rank."""
    pairs: list[tuple[Tensor, Tensor]] = []
    for one in each:
        for models, mains in PAIRS:
            for group, others in zip(getattr(one, models, ()), getattr(one, mains, ()), strict=True):
                pairs += [(main, own) for own, main in zip(group, others, strict=True) if main is not None]
    world = dist.get_world_size() if dist.is_initialized() else 1
    if world == 1:
        return Told(pairs)
    parameters = [(one, parameter) for one in each for parameter in one.get_parameters()]
    strange = [type(one).__name__ for one in each if type(one) not in KNOWN]
    if strange or any(getattr(parameter, "__fsdp_param__", False) for _, parameter in parameters):
        kind = strange[0] if strange else "Megatron's FSDP"
        return Told(pairs, untold=f"nothing tells which rank holds what under {kind}")
    if not any(isinstance(one, DistributedOptimizer) for one in each) and not _is_split():
        return Told(pairs)  # all ranks train the same
    return Told(pairs, [(parameter, _weight(one, parameter, world)) for one, parameter in parameters])


def _weight(optimizer: MegatronOptimizer, parameter: Tensor, world: int) -> float:
    """Return how often a tensor counts: what Megatron adds up over a group for its own norm, over the number of such groups."""
    if not param_is_not_shared(parameter):
        return 0.0
    if not param_is_not_tensor_parallel_duplicate(parameter, getattr(optimizer, "tp_group", None)):
        return 0.0
    return float(optimizer.get_grad_stats_parallel_group().size()) / world


def _is_split() -> bool:
    """Say whether ranks hold different parts of the model. Where Megatron's own groups are not there, they may."""
    place = _place()
    return not place or any(place[name][1] > 1 for name in ("tensor", "pipeline", "expert"))


def _place() -> dict[str, tuple[int, int]]:
    """Return this rank's place and the number of places along each way of parallelism; empty without Megatron's own groups."""
    if not parallel_state.model_parallel_is_initialized():
        return {}
    return {
        "tensor": (
            parallel_state.get_tensor_model_parallel_rank(),
            parallel_state.get_tensor_model_parallel_world_size(),
        ),
        "pipeline": (
            parallel_state.get_pipeline_model_parallel_rank(),
            parallel_state.get_pipeline_model_parallel_world_size(),
        ),
        "context": (parallel_state.get_context_parallel_rank(), parallel_state.get_context_parallel_world_size()),
        "expert": (
            parallel_state.get_expert_model_parallel_rank(),
            parallel_state.get_expert_model_parallel_world_size(),
        ),
        "data": (parallel_state.get_data_parallel_rank(), parallel_state.get_data_parallel_world_size()),
    }


def _micro_batch_size() -> int | None:
    """Return what Megatron's calculator was set up with, or None."""
    if num_microbatches_calculator._GLOBAL_NUM_MICROBATCHES_CALCULATOR is None:
        return None
    return int(num_microbatches_calculator.get_micro_batch_size())


def _vocabulary(chunks: Sequence[nn.Module]) -> int | None:
    """Return how many token ids the model has, None where this rank has no table of them: an ``nn.Embedding`` holds positions here."""
    parts: list[Any] = [
        part for chunk in chunks for part in chunk.modules() if isinstance(part, VocabParallelEmbedding)
    ]
    return max((int(part.num_embeddings) for part in parts), default=None)


def _mean(values: Sequence[Any]) -> Tensor:
    """Return the mean over micro-batches as Megatron-LM's ``train_step`` takes it: of pairs (sum, tokens) the sum over the tokens.

    Raises:
        ValueError: a value has other than one or two numbers.
    """
    flat = [_numbers(value) for value in values]
    if any(value.numel() != flat[0].numel() or value.numel() not in (1, 2) for value in flat):
        raise ValueError(f"losses of shapes {[tuple(value.shape) for value in flat]}: (sum, tokens) or one number each")
    together = torch.stack(flat)
    if flat[0].numel() == 1:
        return together.mean()
    total, tokens = together.sum(dim=0).unbind()
    return total / tokens


def _numbers(value: Any) -> Tensor:
    """Return a loss as a flat tensor in float32 or better: Megatron-LM up to core 0.12 has pairs in tuples."""
    if isinstance(value, tuple | list):
        return torch.cat([_numbers(part) for part in value])
    found = value.detach().reshape(-1) if isinstance(value, Tensor) else torch.tensor([float(value)])
    return found.to(torch.promote_types(found.dtype, torch.float32))
