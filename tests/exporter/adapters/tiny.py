"""A GPT-2 of a few thousand parameters on random tokens, and what transformers' Trainer needs to train it on a CPU."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch
from torch import nn
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments

from trainwarden.record import Ranges

VOCABULARY, LENGTH = 64, 16


def config() -> GPT2Config:
    return GPT2Config(
        vocab_size=VOCABULARY,
        n_positions=LENGTH,
        n_embd=16,
        n_layer=1,
        n_head=2,
        attn_pdrop=0.0,
        resid_pdrop=0.0,
        embd_pdrop=0.0,
        bos_token_id=0,
        eos_token_id=0,
    )


def make(kind: type[GPT2LMHeadModel] = GPT2LMHeadModel) -> GPT2LMHeadModel:
    torch.manual_seed(0)
    model = kind(config())
    model.loss_type = (
        "ForCausalLM"  # transformers finds none by the name of this class, and would count a token a row too much
    )
    return model


def rows(count: int = 50) -> list[dict[str, torch.Tensor]]:
    """Return rows of random tokens, of which four to fourteen carry a loss."""
    generator = torch.Generator().manual_seed(1)
    found = []
    for number in range(count):
        ids = torch.randint(0, VOCABULARY, (LENGTH,), generator=generator)
        found.append({"input_ids": ids, "labels": torch.where(torch.arange(LENGTH) < 4 + number % 11, ids, -100)})
    return found


def order(epoch: int, count: int = 50, seed: int = 42) -> list[int]:
    """Return the rows in the order of an epoch of Accelerate's seeded sampler; 42 is the seed of TrainingArguments."""
    generator = torch.Generator().manual_seed(seed + epoch)
    found: list[int] = torch.randperm(count, generator=generator).tolist()
    return found


def rows_at(epoch: int, samples: Ranges, count: int = 50) -> list[int]:
    """Return the rows at the positions of a record."""
    return [order(epoch, count)[position] for first, end in samples for position in range(first, end)]


def arguments(folder: Path, **others: Any) -> TrainingArguments:
    """Return arguments of ten steps of four rows that log every step and save nothing."""
    chosen = {
        "output_dir": str(folder / "out"),
        "max_steps": 10,
        "per_device_train_batch_size": 4,
        "learning_rate": 1e-2,
        "lr_scheduler_type": "constant_with_warmup",
        "logging_steps": 1,
        "save_strategy": "no",
        "report_to": [],
        "disable_tqdm": True,
        "use_cpu": True,
        "remove_unused_columns": False,
    }
    return TrainingArguments(**{**chosen, **others})


def trainer(
    folder: Path, callbacks: list[Any], *, kind: type[Trainer] = Trainer, model: nn.Module | None = None, **others: Any
) -> Trainer:
    """Return a Trainer; ``others`` are its own arguments ``train_dataset`` … or those of :func:`arguments`."""
    own = {name: others.pop(name) for name in ("train_dataset", "eval_dataset", "compute_loss_func") if name in others}
    return kind(
        model=make() if model is None else model,
        args=arguments(folder, **others),
        callbacks=callbacks,
        **{"train_dataset": rows(), **own},
    )


def curve(of: Trainer, name: str = "loss") -> list[float]:
    """Return what the trainer logged at each step."""
    return [entry[name] for entry in of.state.log_history if "loss" in entry]


def weights(model: nn.Module) -> list[torch.Tensor]:
    return [parameter.detach().clone() for parameter in model.parameters()]


def loss64(model: nn.Module, batches: list[list[dict[str, torch.Tensor]]]) -> float:
    """Return the token-weighted loss of some micro-batches in float64: the mean over all tokens that carry a loss."""
    total, count = 0.0, 0
    for batch in batches:
        ids, labels = (torch.stack([row[name] for row in batch]) for name in ("input_ids", "labels"))
        with torch.no_grad():
            logits = model(input_ids=ids).logits[:, :-1].flatten(0, 1)
        total += float(nn.functional.cross_entropy(logits, labels[:, 1:].flatten(), reduction="sum"))
        count += int((labels[:, 1:] != -100).sum())
    return total / count
