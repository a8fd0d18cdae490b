"""A trainer built like torchtitan's, on a tiny Llama, and the one line that watches it.

    python examples/titan_style.py [steps]
    torchrun --nproc-per-node=2 examples/titan_style.py [steps]

Configuration in, ``train()`` out: a list of model parts, containers of optimizers and schedules, gradient accumulation, clipping over
DTensors, checkpoints by torch.distributed.checkpoint in the background, a loader with a state. With several ranks the model is sharded by
``fully_shard``. Run it twice: it goes on where it was. Its records stay in ``.trainwarden/titan``, its checkpoints in ``.titan``.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict, set_optimizer_state_dict
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor
from torch.optim.lr_scheduler import LambdaLR

from trainwarden.exporter.adapters.torchtitan import attach


@dataclass(slots=True)
class Config:
    """What is trained, and how."""

    steps: int = 20
    folder: str = ".titan"
    width: int = 32
    layers: int = 2
    heads: int = 4
    length: int = 32
    local_batch_size: int = 4
    gradient_accumulation_steps: int = 2
    lr: float = 3e-3
    warmup_steps: int = 5
    max_norm: float = 1.0
    checkpoint_interval: int = 5


class Attention(nn.Module):
    """Causal attention with rotary positions."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.heads = config.heads
        self.wq, self.wk, self.wv, self.wo = (nn.Linear(config.width, config.width, bias=False) for _ in range(4))
        size = config.width // config.heads
        angles = torch.outer(torch.arange(config.length), 1e4 ** (-torch.arange(0, size, 2) / size))
        self.register_buffer("turns", torch.polar(torch.ones_like(angles), angles), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        """Return (batch, length, width)."""
        q, k, v = (part(x).unflatten(-1, (self.heads, -1)).transpose(1, 2) for part in (self.wq, self.wk, self.wv))
        q, k = (
            torch.view_as_real(torch.view_as_complex(part.unflatten(-1, (-1, 2))) * self.turns).flatten(-2)
            for part in (q, k)
        )
        out = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        mixed: Tensor = self.wo(out.transpose(1, 2).flatten(-2))
        return mixed


class Block(nn.Module):
    """Attention and a gated feed-forward, each behind its norm."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.attention_norm, self.ffn_norm = nn.RMSNorm(config.width), nn.RMSNorm(config.width)
        self.attention = Attention(config)
        self.w1, self.w3 = (nn.Linear(config.width, 3 * config.width, bias=False) for _ in range(2))
        self.w2 = nn.Linear(3 * config.width, config.width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Return (batch, length, width)."""
        x = x + self.attention(self.attention_norm(x))
        y = self.ffn_norm(x)
        result: Tensor = x + self.w2(nn.functional.silu(self.w1(y)) * self.w3(y))
        return result


class Llama(nn.Module):
    """Predicts the next byte."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.tok_embeddings = nn.Embedding(256, config.width)
        self.layers = nn.ModuleDict({str(number): Block(config) for number in range(config.layers)})
        self.norm = nn.RMSNorm(config.width)
        self.output = nn.Linear(config.width, 256, bias=False)

    def forward(self, ids: Tensor) -> Tensor:
        """Return logits, (batch, length, 256)."""
        x = self.tok_embeddings(ids)
        for layer in self.layers.values():
            x = layer(x)
        logits: Tensor = self.output(self.norm(x))
        return logits


class ParallelDims:
    """Which ranks share what: here the data alone, where there are several."""

    pp_enabled = False

    def __init__(self) -> None:
        world = dist.get_world_size()
        self.mesh = init_device_mesh("cpu", (world,), mesh_dim_names=("fsdp",)) if world > 1 else None

    def get_optional_mesh(self, name: str) -> DeviceMesh | None:
        """Return the mesh of a dimension, None where it has one rank."""
        return self.mesh if name in ("batch", "loss", "fsdp") else None


class OptimizersContainer(torch.optim.Optimizer):
    """Several optimizers as one: matrices and the rest of each model part have their own."""

    def __init__(self, parts: list[nn.Module], lr: float) -> None:
        self.model_parts = parts
        self.optimizers: list[torch.optim.Optimizer] = []
        for part in parts:
            matrices = [parameter for parameter in part.parameters() if parameter.ndim > 1]
            others = [parameter for parameter in part.parameters() if parameter.ndim < 2]
            self.optimizers.append(torch.optim.AdamW(matrices, lr=lr, betas=(0.9, 0.95), weight_decay=0.1))
            self.optimizers.append(torch.optim.Adam(others, lr=lr, betas=(0.9, 0.95)))
        super().__init__([parameter for part in parts for parameter in part.parameters()], {})

    def __iter__(self) -> Iterator[torch.optim.Optimizer]:
        return iter(self.optimizers)

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Step all of them."""
        for optimizer in self.optimizers:
            optimizer.step()

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drop all gradients."""
        for optimizer in self.optimizers:
            optimizer.zero_grad(set_to_none=set_to_none)

    def state_dict(self) -> dict[str, Any]:
        """Return the states by the names of the parameters, for any number of ranks."""
        return {key: value for part in self.model_parts for key, value in self._state_of(part).items()}

    def _state_of(self, part: nn.Module) -> dict[str, Any]:
        found: dict[str, Any] = dict(get_optimizer_state_dict(part, self.optimizers, options=_FLAT))
        return found

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take the states over."""
        for part in self.model_parts:
            set_optimizer_state_dict(part, self.optimizers, state_dict, options=_FLAT)


_FLAT = dcp.state_dict.StateDictOptions(flatten_optimizer_state_dict=True)


class LRSchedulersContainer:
    """One schedule for each optimizer, all at the same step."""

    def __init__(self, optimizers: OptimizersContainer, factor: Callable[[int], float]) -> None:
        self.schedulers = [LambdaLR(optimizer, factor) for optimizer in optimizers]

    def step(self) -> None:
        """Step all of them."""
        for scheduler in self.schedulers:
            scheduler.step()

    def state_dict(self) -> dict[str, Any]:
        """Return the step."""
        return {"last_epoch": self.schedulers[0].last_epoch}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go on at a step."""
        for scheduler in self.schedulers:
            scheduler.load_state_dict({**scheduler.state_dict(), **state_dict})
            for group, base in zip(scheduler.optimizer.param_groups, scheduler.base_lrs, strict=True):
                group["lr"] = base * scheduler.lr_lambdas[0](scheduler.last_epoch)


class Bytes:
    """An endless loader over this file's own bytes, with a state; each rank reads every ``world``-th sample."""

    num_workers = 0

    def __init__(self, config: Config, rank: int, world: int) -> None:
        self.batch_size, self._length, self._rank, self._world = config.local_batch_size, config.length, rank, world
        self._text = torch.tensor(list(Path(__file__).read_bytes()))
        self._drawn = 0

    def __iter__(self) -> Iterator[tuple[dict[str, Tensor], Tensor]]:
        while True:
            first = self._drawn * self.batch_size * self._world + self._rank * self.batch_size
            self._drawn += 1
            starts = [at * 7919 % (len(self._text) - self._length) for at in range(first, first + self.batch_size)]
            rows = torch.stack([self._text[at : at + self._length + 1] for at in starts])
            yield {"input": rows[:, :-1]}, rows[:, 1:]

    def state_dict(self) -> dict[str, Any]:
        """Return how many batches were drawn."""
        return {"drawn": self._drawn}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go on behind them."""
        self._drawn = state_dict["drawn"]

    def close(self) -> None:
        """Nothing is open."""


class Checkpointer:
    """Saves every so many steps, in the background, under ``folder/step-N``."""

    last_save_model_only = False

    def __init__(self, config: Config, parts: list[nn.Module], states: dict[str, Any]) -> None:
        self.folder = str(Path(config.folder).absolute())
        self.interval = config.checkpoint_interval
        self.states = states
        self.save_future: Any = None
        self._parts = parts
        self._group = dist.new_group(backend="gloo")  # the background saves over a group of its own

    def _create_checkpoint_id(self, step: int) -> str:
        return str(Path(self.folder) / f"step-{step}")

    def _should_save(self, curr_step: int, last_step: bool = False) -> bool:
        return last_step or curr_step % self.interval == 0

    def save(self, curr_step: int, last_step: bool = False) -> bool:
        """Begin to save, where it is time to; say whether it was."""
        if not self._should_save(curr_step, last_step):
            return False
        self.wait()
        path = self._create_checkpoint_id(curr_step)
        self.save_future = dcp.async_save(self._all(), checkpoint_id=path, process_group=self._group)
        return True

    def newest(self) -> int:
        """Return the step of the newest checkpoint, 0 where there is none."""
        return max((int(path.parent.name[5:]) for path in Path(self.folder).glob("step-*/.metadata")), default=0)

    def load(self, step: int = -1) -> bool:
        """Load a step, or the newest one; say whether there was any."""
        if step == -1:
            step = self.newest()
            if not step:
                return False
        states = self._all()
        dcp.load(states, checkpoint_id=self._create_checkpoint_id(step))
        for part in self._parts:
            part.load_state_dict({name: states[name] for name in part.state_dict()})
        return True

    def _all(self) -> dict[str, Any]:
        return {**{name: value for part in self._parts for name, value in part.state_dict().items()}, **self.states}

    def wait(self) -> None:
        """Wait for what is being saved."""
        if self.save_future is not None:
            self.save_future.result()
            self.save_future = None

    def close(self) -> None:
        """Wait for what is being saved."""
        self.wait()


def clip_grad_norm_(parameters: list[nn.Parameter], max_norm: float) -> Tensor:
    """Clip by the norm over all ranks, and return it."""
    gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
    total = nn.utils.get_total_norm(gradients)
    if isinstance(total, DTensor):
        total = total.full_tensor()
    nn.utils.clip_grads_with_norm_(parameters, max_norm, total)
    return total


class Trainer:
    """Makes everything out of the configuration, and trains."""

    def __init__(self, config: Config) -> None:
        self.config = config
        self.parallel_dims = ParallelDims()
        mesh = self.parallel_dims.get_optional_mesh("fsdp")
        rank, world = dist.get_rank(), dist.get_world_size()
        torch.manual_seed(0)
        model = Llama(config)
        if mesh is not None:
            for layer in model.layers.values():
                fully_shard(layer, mesh=mesh)
            fully_shard(model, mesh=mesh)
            for module in model.modules():
                if isinstance(
                    module, FSDPModule
                ):  # each loss is divided by the tokens of all ranks: add, do not average
                    module.set_gradient_divide_factor(1.0)
                    module.set_force_sum_reduction_for_comms(True)
        self.model_parts: list[nn.Module] = [model]
        self.optimizers = OptimizersContainer(self.model_parts, config.lr)
        self.lr_schedulers = LRSchedulersContainer(
            self.optimizers, lambda step: min(1.0, (step + 1) / config.warmup_steps)
        )
        self.gradient_accumulation_steps = config.gradient_accumulation_steps
        self.step = 0
        self.dataloader = Bytes(config, rank, world)
        self.checkpointer = Checkpointer(
            config,
            self.model_parts,
            {
                "optimizer": self.optimizers,
                "lr_scheduler": self.lr_schedulers,
                "dataloader": self.dataloader,
                "train_state": self,
            },
        )

    def forward_backward_step(
        self, *, input_dict: dict[str, Tensor], labels: Tensor, global_valid_tokens: Tensor
    ) -> Tensor:
        """Return this rank's summed loss over the valid tokens of all ranks, its gradients made."""
        logits = self.model_parts[0](input_dict["input"])
        loss = nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum")
        loss = loss / global_valid_tokens
        loss.backward()  # type: ignore[no-untyped-call]
        return loss

    def train_step(self, data_iterator: Iterator[tuple[dict[str, Tensor], Tensor]]) -> None:
        """Make one optimizer step out of several micro-batches."""
        self.optimizers.zero_grad()
        batches = [next(data_iterator) for _ in range(self.gradient_accumulation_steps)]
        valid = torch.tensor(sum(labels.numel() for _, labels in batches))
        dist.all_reduce(valid)
        loss = torch.zeros(())
        for inputs, labels in batches:
            loss += self.forward_backward_step(input_dict=inputs, labels=labels, global_valid_tokens=valid).detach()
        parameters = [parameter for part in self.model_parts for parameter in part.parameters()]
        clip_grad_norm_(parameters, self.config.max_norm)
        self.optimizers.step()
        self.lr_schedulers.step()
        dist.all_reduce(loss)
        if dist.get_rank() == 0 and self.step % 5 == 0:
            print(f"step {self.step} loss {float(loss):.3f}")

    def train(self) -> None:
        """Go on from the newest checkpoint until all steps are made."""
        self.checkpointer.load()
        batches = iter(self.dataloader)
        while self.step < self.config.steps:
            self.step += 1
            self.train_step(batches)
            self.checkpointer.save(self.step, last_step=self.step == self.config.steps)

    def close(self) -> None:
        """Let go of what is open."""
        self.checkpointer.close()
        self.dataloader.close()

    def state_dict(self) -> dict[str, Any]:
        """Return the step."""
        return {"step": self.step}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go on behind a step."""
        self.step = state_dict["step"]


def main(steps: int = 20) -> None:
    """Train some steps more than the newest checkpoint has."""
    if "RANK" in os.environ:
        dist.init_process_group("gloo")
    else:
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    trainer = Trainer(Config())
    trainer.config.steps = trainer.checkpointer.newest() + steps
    exporter = attach(trainer, run="titan", dataset="this file")  # the one line
    try:
        trainer.train()
    finally:
        trainer.close()
    if dist.get_rank() == 0:
        print(f"steps up to {exporter.global_step} are recorded")
    dist.destroy_process_group()


if __name__ == "__main__":
    main(*(int(argument) for argument in sys.argv[1:]))
