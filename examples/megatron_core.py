"""A loop of Megatron-core's parts, as Megatron-LM's ``train`` has it, and the lines that watch it and let it be rolled back.

    torchrun --nproc-per-node=2 examples/megatron_core.py [iterations]

Needs NVIDIA GPUs and ``pip install megatron-core``. A small GPT learns this file: with two ranks by tensor parallelism, with more by data
parallelism as well, in bfloat16. Run it twice: it goes on where it was. Its records stay in
``.trainwarden/megatron-core``, its checkpoints in ``.megatron-core``.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import dist_checkpointing, parallel_state
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler
from megatron.core.pipeline_parallel.schedules import get_forward_backward_func
from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
from megatron.core.transformer.module import Float16Module
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor, nn

from trainwarden.exporter.adapters.megatron import TRACKER, attach, checkpoint_path

LENGTH, MICRO_BATCH, MICRO_BATCHES = 64, 4, 2
FOLDER = Path(".megatron-core")
TEXT = torch.tensor(list(Path(__file__).read_bytes()))


def rows(consumed: int) -> Iterator[Tensor]:
    """Yield this rank's micro-batches from a position on: data ranks take turns, as with ``--dataloader-type single``."""
    place, number = parallel_state.get_data_parallel_rank(), parallel_state.get_data_parallel_world_size()
    count = len(TEXT) - LENGTH - 1
    while True:
        own = range(consumed + place * MICRO_BATCH, consumed + (place + 1) * MICRO_BATCH)
        starts = [sample * 7919 % count for sample in own]  # an order that the position alone decides
        yield torch.stack([TEXT[start : start + LENGTH + 1] for start in starts]).to(torch.cuda.current_device())
        consumed += number * MICRO_BATCH


def forward_step(iterator: Iterator[Tensor], model: nn.Module) -> tuple[Tensor, Callable[..., Any]]:
    """Return a micro-batch's losses, and the function that makes one of them: the sum, its tokens, and both to be reported."""
    text = next(iterator)
    ids, labels = text[:, :-1].contiguous(), text[:, 1:].contiguous()
    places = torch.arange(LENGTH, device=ids.device).expand_as(ids)
    hidden = torch.ones(1, 1, LENGTH, LENGTH, dtype=torch.bool, device=ids.device).triu(1)
    return model(ids, places, hidden, labels=labels), partial(loss_func, torch.ones_like(labels, dtype=torch.float))


def loss_func(mask: Tensor, losses: Tensor) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
    """Return sum, tokens, and what is reported."""
    total, tokens = (losses.float() * mask).sum(), mask.sum().to(torch.int)
    return total, tokens, {"lm loss": torch.cat([total.detach().view(1), tokens.float().view(1)])}


def build() -> tuple[nn.Module, Any, Any]:
    """Return model, optimizer and scheduler."""
    tensor = 2 if dist.get_world_size() > 1 else 1
    parallel_state.initialize_model_parallel(tensor_model_parallel_size=tensor)
    torch.manual_seed(1)
    model_parallel_cuda_manual_seed(1)
    config = TransformerConfig(
        num_layers=2,
        hidden_size=64,
        num_attention_heads=4,
        tensor_model_parallel_size=tensor,
        bf16=True,
        params_dtype=torch.bfloat16,
        use_cpu_initialization=True,
        attention_dropout=0.0,
        hidden_dropout=0.0,
        gradient_accumulation_fusion=False,
    )
    layers = get_gpt_layer_local_spec()
    gpt = GPTModel(config=config, transformer_layer_spec=layers, vocab_size=256, max_sequence_length=LENGTH)
    gpt = gpt.to(torch.cuda.current_device())
    wrapped = DistributedDataParallelConfig(grad_reduce_in_fp32=True)
    model = DistributedDataParallel(config, wrapped, Float16Module(config, gpt))
    model.broadcast_params()
    how = OptimizerConfig(optimizer="adam", lr=3e-3, bf16=True, params_dtype=torch.bfloat16, clip_grad=1.0)
    optimizer = get_megatron_optimizer(how, [model])
    config.grad_scale_func, config.finalize_model_grads_func = optimizer.scale_loss, finalize_model_grads
    scheduler = OptimizerParamScheduler(optimizer, 0.0, 3e-3, 3e-4, 160, 16000, "cosine", 0.01, 0.01, 0, "constant")
    return model, optimizer, scheduler


def state(model: Any, optimizer: Any, scheduler: Any, consumed: int, loading: bool = False) -> dict[str, Any]:
    """Return all that a run goes on from."""
    parts = model.module.sharded_state_dict()
    return {
        "model": parts,
        "optimizer": optimizer.sharded_state_dict(parts, is_loading=loading),
        "scheduler": scheduler.state_dict(),
        "consumed": consumed,
    }


def main(iterations: int = 20) -> None:
    """Train for so many iterations more."""
    model, optimizer, scheduler = build()
    exporter = attach([model], optimizer, run="megatron-core", micro_batch_size=MICRO_BATCH)

    iteration, consumed = exporter.iteration_to_load(FOLDER) or 0, 0
    if iteration:
        wanted = state(model, optimizer, scheduler, 0, loading=True)
        loaded = dist_checkpointing.load(wanted, str(checkpoint_path(FOLDER, iteration)))
        model.module.load_state_dict(loaded["model"])
        optimizer.load_state_dict(loaded["optimizer"])
        scheduler.load_state_dict(loaded["scheduler"])
        consumed = int(loaded["consumed"])
    exporter.resumed(iteration, consumed_samples=consumed)

    data, first = rows(consumed), iteration + 1
    step = MICRO_BATCH * MICRO_BATCHES * parallel_state.get_data_parallel_world_size()
    for _ in range(iterations):
        model.zero_grad_buffer()
        optimizer.zero_grad()
        losses_reduced = get_forward_backward_func()(
            forward_step_func=forward_step,
            data_iterator=data,
            model=[model],
            num_microbatches=MICRO_BATCHES,
            seq_length=LENGTH,
            micro_batch_size=MICRO_BATCH,
            forward_only=False,
        )
        update_successful, _grad_norm, _num_zeros = optimizer.step()
        if update_successful:
            scheduler.step(increment=step)
        iteration, consumed = iteration + 1, consumed + step
        exporter.step(losses_reduced, consumed_samples=consumed)

    path = checkpoint_path(FOLDER, iteration)
    if dist.get_rank() == 0:
        path.mkdir(parents=True, exist_ok=True)
    dist.barrier()
    with exporter.phase("checkpoint"):
        dist_checkpointing.save(state(model, optimizer, scheduler, consumed), str(path))
        if dist.get_rank() == 0:
            (FOLDER / TRACKER).write_text(str(iteration))
        dist.barrier()
    exporter.saved(iteration, FOLDER)
    exporter.close()
    if dist.get_rank() == 0:
        print(f"iterations {first} to {iteration} are recorded in .trainwarden/megatron-core")


if __name__ == "__main__":
    if not torch.cuda.is_available():
        sys.exit("Megatron-core needs an NVIDIA GPU, and torch sees none here")
    torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
    dist.init_process_group("nccl")
    main(*map(int, sys.argv[1:]))
    dist.destroy_process_group()
