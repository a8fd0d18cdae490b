"""Hugging Face's Trainer with one callback: a small GPT-2 from scratch on this file's own text. Nothing is downloaded.

    python examples/hf_trainer.py [steps]

Its records stay in ``.trainwarden/hf-trainer``, its checkpoints in ``.trainwarden/hf-trainer-checkpoints``. Called again, it goes on
from the newest of them, to as many steps more.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments

from trainwarden.exporter.adapters.hf_trainer import TrainwardenCallback

LENGTH = 32


def rows() -> list[dict[str, torch.Tensor]]:
    """Return every stretch of this file, a byte a token."""
    text = torch.tensor(list(Path(__file__).read_bytes()))
    return [{"input_ids": (piece := text[at : at + LENGTH]), "labels": piece} for at in range(len(text) - LENGTH)]


def main(steps: int = 40) -> None:
    """Train for some steps."""
    torch.manual_seed(0)
    torch.set_num_threads(1)  # for so small a model, more cost more than they bring
    folder = Path(os.environ.get("TRAINWARDEN_DIR") or ".trainwarden")
    sizes: dict[str, Any] = {"vocab_size": 256, "n_positions": LENGTH, "n_embd": 64, "n_layer": 2, "n_head": 4}
    model = GPT2LMHeadModel(GPT2Config(**sizes, bos_token_id=0, eos_token_id=0))

    warden = TrainwardenCallback(run="hf-trainer")  # 1
    path = warden.checkpoint()  # 2: what a plan names, else the newest; None in a run that begins
    done = 0 if path is None else int(Path(path).name.rpartition("-")[2])
    arguments = TrainingArguments(
        output_dir=str(folder / "hf-trainer-checkpoints"),
        max_steps=done + steps,
        per_device_train_batch_size=8,
        gradient_accumulation_steps=2,
        learning_rate=3e-3,
        lr_scheduler_type="constant",
        logging_steps=10,
        save_steps=20,
        report_to=[],
        dataloader_pin_memory=False,
        disable_tqdm=True,
    )
    trainer = Trainer(model, arguments, train_dataset=rows(), callbacks=[warden])  # 3
    result = trainer.train(resume_from_checkpoint=path)  # 4
    print(f"steps {done + 1} to {trainer.state.global_step}, mean loss {result.training_loss:.3f}")
    for notice in warden.notices:
        print(notice)


if __name__ == "__main__":
    main(*(int(argument) for argument in sys.argv[1:]))
