"""A loop of one's own with all that usually is in one: micro-batches, a GradScaler, clipping, a schedule, checkpoints, resuming.

    python examples/accumulation.py [steps]

Run it twice: the second time it goes on where the first ended, with the data that comes next. Its records stay in
``.trainwarden/accumulation``, its checkpoints in ``.accumulation``.
"""

from __future__ import annotations

import sys
from itertools import islice
from pathlib import Path

import torch
from torch import nn

from trainwarden.exporter import Exporter

LENGTH, WIDTH, MICRO_BATCHES, EVERY = 32, 64, 4, 10
FOLDER = Path(".accumulation")


def main(steps: int = 30) -> None:
    """Train some steps more than the newest checkpoint has."""
    torch.manual_seed(0)
    text = torch.tensor(list(Path(__file__).read_bytes()))
    rows = [text[at : at + LENGTH + 1] for at in range(len(text) - LENGTH - 1)]
    loader = torch.utils.data.DataLoader(rows, batch_size=8, shuffle=True)  # type: ignore[arg-type]
    model = nn.Sequential(nn.Embedding(256, WIDTH), nn.Linear(WIDTH, WIDTH), nn.GELU(), nn.Linear(WIDTH, 256))
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / 10))
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**12, growth_interval=20)  # "cuda" on a GPU
    parts = {"model": model, "optimizer": optimizer, "schedule": schedule, "scaler": scaler}

    exporter = Exporter(model, optimizer, run="accumulation", scaler=scaler)
    parts["loader"] = loader = exporter.wrap(loader, seed=0, dataset="this file")
    begun = 0
    target = exporter.resume()  # what a plan names, else the newest whole checkpoint
    if target is not None:
        state = torch.load(target.path, weights_only=True)
        for name, part in parts.items():
            part.load_state_dict(state[name])
        begun = state["step"]
    exporter.resumed(begun)  # what a plan asks of the optimizer is done now

    batches = iter(loader)
    while exporter.global_step < begun + steps:
        micro_batches = list(islice(batches, MICRO_BATCHES))
        if len(micro_batches) < MICRO_BATCHES:
            batches = iter(loader)  # the next epoch
            continue
        for batch in micro_batches:
            with torch.autocast("cpu", dtype=torch.float16):
                logits = model(batch[:, :-1])
            loss = nn.functional.cross_entropy(logits.flatten(0, 1).float(), batch[:, 1:].flatten())
            scaler.scale(loss / MICRO_BATCHES).backward()
            exporter.micro(loss)  # as it is before the division; the step's loss is their mean
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        schedule.step()
        exporter.step()  # once per optimizer step
        step = exporter.global_step
        if step % EVERY == 0:
            path = FOLDER / f"step-{step}.pt"
            path.parent.mkdir(exist_ok=True)
            aside = path.with_suffix(".part")
            with exporter.phase("checkpoint"):
                torch.save({**{name: part.state_dict() for name, part in parts.items()}, "step": step}, aside)
            aside.rename(path)  # whole, or not there
            exporter.checkpoint(step, path)
    exporter.close()
    print(f"steps {begun + 1} to {exporter.global_step}, last loss {float(loss.detach()):.3f}")


if __name__ == "__main__":
    main(*(int(argument) for argument in sys.argv[1:]))
