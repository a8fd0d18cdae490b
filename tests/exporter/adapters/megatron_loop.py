"""A loop of Megatron-core's own parts on CPUs: a tiny GPT, its DDP, its optimizers, its schedules, as Megatron-LM's train_step has them.

The library runs as it is; it only believes that a CPU is a CUDA device. :func:`on_cpu` replaces, in this process alone, what it asks of
one without a choice: ``device="cuda"`` in torch's factories, the names of tensor types (``torch.cuda.FloatTensor``), ``Tensor.cuda``,
the current device, waiting for it, and its generator of random numbers. Everything else, collectives over gloo included, is real.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

VOCABULARY, LENGTH, MICRO, MICROS = 64, 16, 2, 2


class OnCPU(TorchFunctionMode):
    """Has torch's own functions take CUDA devices for the CPU."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        device = kwargs.get("device")
        if device is not None and torch.device(device).type == "cuda":
            kwargs["device"] = "cpu"
        if func is Tensor.type and len(args) == 1 and not kwargs:
            return func(*args).replace("torch.", "torch.cuda.")
        if func is Tensor.cuda:
            return args[0]
        return func(*args, **kwargs)


def on_cpu() -> None:
    """Let Megatron-core run in this process, for good."""
    torch.cuda.current_device = lambda: torch.device("cpu")  # type: ignore[assignment, return-value]
    torch.cuda.synchronize = lambda device=None: None
    torch.cuda.get_rng_state = lambda device="cuda": torch.get_rng_state()
    torch.cuda.manual_seed = torch.manual_seed  # type: ignore[assignment]
    from megatron.core.tensor_parallel import random

    random._set_cuda_rng_state = lambda new_state, device=-1, graph_safe=False: torch.set_rng_state(new_state)
    random._get_cuda_rng_state = lambda device="cuda", clone=False, graph_safe=False: torch.get_rng_state()
    OnCPU().__enter__()


@dataclass
class Loop:
    """A model with its optimizer, and what its steps gave. ``consumed`` is Megatron-LM's ``args.consumed_train_samples``."""

    model: list[Any]
    optimizer: Any
    scheduler: Any
    iterator: Iterator[Tensor]
    consumed: int = 0
    losses: list[Any] = field(default_factory=list)
    steps: list[dict[str, Any]] = field(default_factory=list)

    def step(self, exporter: Any = None, look: Callable[[Loop], dict[str, Any]] | None = None) -> None:
        """Make an iteration as ``train_step`` does; ``look`` sees the gradients that are reduced and scaled."""
        from megatron.core import parallel_state
        from megatron.core.pipeline_parallel.schedules import get_forward_backward_func

        for chunk in self.model:
            chunk.zero_grad_buffer()
        self.optimizer.zero_grad()
        losses = get_forward_backward_func()(
            forward_step_func=forward,
            data_iterator=self.iterator,
            model=self.model,
            num_microbatches=MICROS,
            seq_length=LENGTH,
            micro_batch_size=MICRO,
            forward_only=False,
        )
        seen = {} if look is None else look(self)
        rate = max(group["lr"] for group in self.optimizer.param_groups)
        scale = float(self.optimizer.get_loss_scale())
        made, norm, zeros = self.optimizer.step()
        samples = MICRO * MICROS * parallel_state.get_data_parallel_world_size()
        if made:
            self.scheduler.step(increment=samples)
        self.consumed += samples
        pairs = [one["lm loss"].tolist() for one in losses]
        loss = sum(pair[0] for pair in pairs) / sum(pair[1] for pair in pairs) if pairs else None
        self.losses = losses
        self.steps.append(
            {"made": bool(made), "norm": norm, "zeros": zeros, "loss": loss, "lr": rate, "scale": scale, **seen}
        )
        if exporter is not None:
            exporter.step(losses, consumed_samples=self.consumed)


def forward(iterator: Iterator[Tensor], model: nn.Module) -> tuple[Tensor, Callable[..., Any]]:
    """Return the output and the loss function of a micro-batch, as pretrain_gpt.py has them."""
    rows = next(iterator)
    ids, labels = rows[:, :-1], rows[:, 1:]
    places = torch.arange(LENGTH)[None].expand_as(ids)
    mask = (torch.arange(LENGTH)[None] >= ids[:, :1] % 5).float()  # micro-batches of different numbers of tokens
    hidden = torch.tril(torch.ones(1, 1, LENGTH, LENGTH)) < 0.5
    return model(ids, places, hidden, labels=labels), partial(loss_of, mask)


def loss_of(mask: Tensor, output: Tensor) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
    """Return the sum of a micro-batch's losses, its number of tokens, and both to be reported."""
    total = (output.float() * mask).sum()
    tokens = mask.sum().to(torch.int)
    return total, tokens, {"lm loss": torch.cat([total.detach().view(1), tokens.float().view(1)])}


def batches(rank: int) -> Iterator[Tensor]:
    generator = torch.Generator().manual_seed(100 + rank)
    while True:
        yield torch.randint(0, VOCABULARY, (MICRO, LENGTH + 1), generator=generator)


def make(
    precision: str = "fp32",
    *,
    sharded: bool = False,
    tensor: int = 1,
    pipeline: int = 1,
    tied: bool = False,
    loss_scale: float = 2.0**16,
    clip: float = 1.0,
    grads: Any = None,
) -> Loop:
    """Return a loop on a GPT of two blocks. torch.distributed is initialised; Megatron's groups are made anew."""
    from megatron.core import parallel_state
    from megatron.core.distributed import (
        DistributedDataParallel,
        DistributedDataParallelConfig,
        finalize_model_grads,
    )
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.models.gpt.gpt_model import GPTModel
    from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
    from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler
    from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
    from megatron.core.transformer.module import Float16Module
    from megatron.core.transformer.transformer_config import TransformerConfig

    if parallel_state.model_parallel_is_initialized():
        parallel_state.destroy_model_parallel()
    parallel_state.initialize_model_parallel(tensor, pipeline)
    torch.manual_seed(7)
    model_parallel_cuda_manual_seed(7, force_reset_rng=True)
    kind = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}[precision]
    half = {} if precision == "fp32" else {precision: True, "params_dtype": kind}
    config = TransformerConfig(
        num_layers=2,
        hidden_size=32,
        num_attention_heads=4,
        use_cpu_initialization=True,
        tensor_model_parallel_size=tensor,
        pipeline_model_parallel_size=pipeline,
        pipeline_dtype=kind,
        attention_dropout=0.0,
        hidden_dropout=0.0,
        gradient_accumulation_fusion=False,
        bias_dropout_fusion=False,
        masked_softmax_fusion=False,
        **half,
    )
    model: nn.Module = GPTModel(
        config=config,
        transformer_layer_spec=get_gpt_layer_local_spec(),
        vocab_size=VOCABULARY,
        max_sequence_length=LENGTH,
        pre_process=parallel_state.is_pipeline_first_stage(),
        post_process=parallel_state.is_pipeline_last_stage(),
        share_embeddings_and_output_weights=tied,
    )
    if half:
        model = Float16Module(config, model)
    reduced = DistributedDataParallelConfig(grad_reduce_in_fp32=True, use_distributed_optimizer=sharded)
    model = DistributedDataParallel(config, reduced, model)
    config.finalize_model_grads_func = finalize_model_grads
    optimizer = get_megatron_optimizer(
        OptimizerConfig(
            optimizer="adam",
            lr=1e-2,
            min_lr=0.0,
            weight_decay=0.1,
            use_distributed_optimizer=sharded,
            clip_grad=clip,
            log_num_zeros_in_grad=True,
            initial_loss_scale=loss_scale,
            hysteresis=1,
            **half,
        ),
        [model],
    )
    config.grad_scale_func = optimizer.scale_loss
    scheduler = OptimizerParamScheduler(optimizer, 0.0, 1e-2, 0.0, 8, 800, "cosine", 0.1, 0.1, 0, "constant")
    return Loop([model], optimizer, scheduler, batches(parallel_state.get_data_parallel_rank()))


def group(name: str) -> str:
    """Return the group of a parameter of this model."""
    words = {"layernorm": "norm", "self_attention": "attention", "mlp": "mlp", "output_layer": "head"}
    return next((found for word, found in words.items() if word in name), "embedding")


def sums(loop: Loop, of: Callable[[Any], Tensor]) -> dict[str, list[float]]:
    """Return sum of squares and number of elements by group over all ranks, in float64, each element once.

    That of replicas the first counts, of copies in tensor parallelism the first, of a tied table the one of the first stage.
    """
    from megatron.core import parallel_state

    found: dict[str, Tensor] = {
        name: torch.zeros(2, dtype=torch.float64) for name in ("embedding", "attention", "mlp", "norm", "head")
    }
    for name, parameter in loop.model[0].named_parameters():
        is_copy = (
            parallel_state.get_data_parallel_rank() > 0
            or getattr(parameter, "shared", False)
            or (
                not getattr(parameter, "tensor_model_parallel", False)
                and parallel_state.get_tensor_model_parallel_rank() > 0
            )
        )
        if not is_copy:
            value = of(parameter).double()
            found[group(name)] += torch.tensor([float(value.square().sum()), value.numel()], dtype=torch.float64)
    for value in found.values():
        torch.distributed.all_reduce(value)
    found["all"] = torch.stack(list(found.values())).sum(dim=0)
    return {name: value.tolist() for name, value in found.items() if value[1] > 0}


def norms(loop: Loop) -> dict[str, Any]:
    """Return the norms of the reduced gradients by group, without the loss scale."""
    scale = float(loop.optimizer.get_loss_scale())
    found = sums(loop, lambda parameter: parameter.main_grad.double() / scale)
    return {"norms": {name: square**0.5 for name, (square, _) in found.items()}}


def sizes(loop: Loop) -> dict[str, float]:
    """Return the RMS by group of what the optimizer updates: of a parameter in low precision its copy in full precision."""
    found = sums(loop, lambda parameter: getattr(parameter, "main_param", parameter).detach())
    return {name: (square / count) ** 0.5 for name, (square, count) in found.items()}
