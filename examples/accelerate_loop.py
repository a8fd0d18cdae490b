"""A loop around Accelerate: a small GPT-2 from scratch on this file's own text. Nothing is downloaded.

    python examples/accelerate_loop.py [steps]

Its records stay in ``.trainwarden/accelerate-loop``, its state in ``.trainwarden/accelerate-loop-state``. Called again, it goes on
from there, for as many steps more. ``accelerate launch examples/accelerate_loop.py`` runs it on several devices.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch
from accelerate import Accelerator, DataLoaderConfiguration
from transformers import GPT2Config, GPT2LMHeadModel

from trainwarden.exporter.adapters.accelerate import attach

LENGTH = 32


def main(steps: int = 40) -> None:
    """Train for some steps of two micro-batches."""
    torch.manual_seed(0)
    torch.set_num_threads(1)  # for so small a model, more cost more than they bring
    folder = Path(os.environ.get("TRAINWARDEN_DIR") or ".trainwarden")
    text = torch.tensor(list(Path(__file__).read_bytes()))
    rows = [text[at : at + LENGTH] for at in range(len(text) - LENGTH)]
    sizes: dict[str, Any] = {"vocab_size": 256, "n_positions": LENGTH, "n_embd": 64, "n_layer": 2, "n_head": 4}
    accelerator = Accelerator(
        gradient_accumulation_steps=2, dataloader_config=DataLoaderConfiguration(use_seedable_sampler=True, data_seed=0)
    )
    model = GPT2LMHeadModel(GPT2Config(**sizes, bos_token_id=0, eos_token_id=0))
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    loader = torch.utils.data.DataLoader(rows, batch_size=8, shuffle=True)  # type: ignore[arg-type]
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)

    exporter = attach(accelerator, model, optimizer, run="accelerate-loop")  # 1: on every rank
    loader = exporter.wrap(loader, dataset="this file")  # 2: sample positions, and skips after a rollback
    accelerator.register_for_checkpointing(loader)  # its position is saved along
    target = exporter.resume()  # what a plan names, else the newest; None in a run that begins
    if target is not None:
        accelerator.load_state(target.path)
    exporter.resumed(0 if target is None else target.step)

    last = exporter.global_step + steps
    while exporter.global_step < last:
        for batch in loader:
            with accelerator.accumulate(model):
                loss = model(input_ids=batch, labels=batch).loss
                accelerator.backward(loss)
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                optimizer.zero_grad()
            exporter.step(loss)  # 3: in every micro-step; closes a record where the accelerator made an update
            if exporter.global_step >= last:
                break
    exporter.save_state(folder / f"accelerate-loop-state/{last}")  # 4: reported as a checkpoint
    exporter.close()
    accelerator.print(f"steps {last - steps + 1} to {last}, last loss {float(loss.detach()):.3f}")


if __name__ == "__main__":
    main(*(int(argument) for argument in sys.argv[1:]))
