"""Small engines of DeepSpeed's on CPUs over gloo, each with the model of :mod:`tests.exporter.runs`, for the scripts of the harness."""

from __future__ import annotations

import logging
import os
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

os.environ["DS_ACCELERATOR"] = "cpu"
os.environ["TORCHDYNAMO_DISABLE"] = (
    "1"  # DeepSpeed asks for one optimizer to be compiled, and that alone imports for seconds
)

import deepspeed
import torch
import torch.distributed as dist
from deepspeed.accelerator import get_accelerator
from torch import nn

from tests.exporter.runs import Block, make, tokens
from trainwarden.exporter.adapters.deepspeed import DeepSpeedExporter, attach

#: On a CPU DeepSpeed would first compile a kernel for processes that share memory, for a minute and a half.
deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
logging.getLogger("DeepSpeed").setLevel(logging.ERROR)
warnings.filterwarnings("ignore", category=FutureWarning)

#: Micro-batches of a step, and the norm that it is clipped at: below that of the first steps.
MICRO, CLIP = 2, 0.3
RATE, DECAY = 1e-2, 0.1


def config(stage: int, precision: str, **others: Any) -> dict[str, Any]:
    chosen: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": 4,
        "gradient_accumulation_steps": MICRO,
        "gradient_clipping": CLIP,
        "zero_optimization": {"stage": stage},
        "steps_per_print": 10**6,
        "optimizer": {"type": "AdamW", "params": {"lr": RATE, "torch_adam": True}},
    }
    if precision == "fp16":
        allow_half()
        chosen["fp16"] = {"enabled": True, "initial_scale_power": 8, "hysteresis": 1}
    elif precision == "bf16":
        chosen["bf16"] = {"enabled": True}
    return {**chosen, **others}


def allow_half() -> None:
    """Let float16 run on a CPU whose fast kernels lack it: torch's plain ones have it."""
    accelerator = get_accelerator()
    accelerator.is_fp16_supported = lambda: True
    accelerator.supported_dtypes = lambda: [torch.float, torch.bfloat16, torch.half]


def groups(model: nn.Module) -> list[dict[str, Any]]:
    """Return two groups, as most trainings have them: one that decays, one that does not."""
    return [
        {"params": [one for one in model.parameters() if one.ndim > 1], "weight_decay": DECAY},
        {"params": [one for one in model.parameters() if one.ndim < 2], "weight_decay": 0.0},
    ]


def engine_of(
    stage: int,
    precision: str = "fp32",
    *,
    training_data: Any = None,
    lr: tuple[float, float] | None = None,
    **others: Any,
) -> Any:
    model = make()
    made, *_ = deepspeed.initialize(
        model=model,
        config=config(stage, precision, **others),
        model_parameters=[{**group, "lr": rate} for group, rate in zip(groups(model), lr or (RATE, RATE), strict=True)],
        training_data=training_data,
        dist_init_required=False,
    )
    return made


def watched(engine: Any, folder: Path, run: str, **arguments: Any) -> DeepSpeedExporter:
    settings = {"port": 0, "reader_seconds": 0.0, "cadence": 1, **arguments}
    return attach(engine, run, dir=folder, **settings)


def micro_batch(number: int, rank: int, world: int) -> torch.Tensor:
    return tokens(number * world + rank)


def loss_on(model: Any, ids: torch.Tensor) -> torch.Tensor:
    return nn.functional.cross_entropy(model(ids[:, :-1]).flatten(0, 1).float(), ids[:, 1:].flatten())


def train(engine: Any, steps: int, first: int = 0) -> list[float]:
    """Make some steps of the engine, and return the norm that it says it took of each."""
    rank, world = dist.get_rank(), dist.get_world_size()
    norms = []
    for number in range(first * MICRO, (first + steps) * MICRO):
        engine.backward(loss_on(engine, micro_batch(number, rank, world)))
        engine.step()
        if (number + 1) % MICRO == 0:
            norms.append(float(engine.get_global_grad_norm() or 0.0))
    return norms


def settle(exporter: DeepSpeedExporter) -> list[str]:
    """Close once all ranks are as far, so that nobody leaves before the others have been heard; return what was said."""
    dist.barrier()
    exporter.close()
    return exporter.notices


def reference(steps: int, world: int) -> Iterator[tuple[float, Block]]:
    """Yield the mean loss of each step and the model with its gradient before clipping: one process, all batches, in float64."""
    model = make().double()
    optimizer = torch.optim.AdamW(groups(model), lr=RATE)
    for step in range(steps):
        optimizer.zero_grad()
        total = 0.0
        for number in range(step * MICRO, (step + 1) * MICRO):
            for rank in range(world):
                ids = micro_batch(number, rank, world)
                logits = model(ids[:, :-1]).flatten(0, 1)
                loss = nn.functional.cross_entropy(logits, ids[:, 1:].flatten()) / (MICRO * world)
                loss.backward()
                total += float(loss.detach())
        yield total, model
        torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP)
        optimizer.step()
