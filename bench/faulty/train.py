"""The training program: an ordinary loop with the exporter in it, and a place for a fault at each of its moments.

    python -m faulty.train JOB.json

With ``WORLD_SIZE`` above 1 it is one of several ranks over gloo that meet in a file beside the job. What it leaves is
``heldout.json`` beside the job, and the exporter's records.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, RandomSampler, Subset

from trainwarden.demo.model import GPT
from trainwarden.exporter import Exporter

from .fault import EVALUATE_EVERY, SCALE, Fault, Training
from .job import Job, read
from .kinds import KINDS
from .texts import DATASET, Text

BETAS = (0.9, 0.99)
WEIGHT_DECAY = 0.01
HELD_OUT_ROWS, AT_ONCE = 256, 64


def main(path: str) -> None:
    """Train until the last step, or until SIGTERM; exit code 143 after the latter."""
    job = read(Path(path))
    fault = KINDS[job.kind](job.values)
    torch.set_num_threads(1)
    torch.manual_seed(job.seed)
    rank, world = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    if world > 1:
        dist.init_process_group(
            "gloo", init_method=f"file://{job.root}/meeting-{os.environ['MEETING']}", rank=rank, world_size=world
        )
    training = _made(job, fault, rank, world)
    asked_to_stop: list[int] = []

    def stop(number: int, frame: object) -> None:
        asked_to_stop.append(number)
        training.kept["asked_to_stop"] = True

    signal.signal(signal.SIGTERM, stop)
    for batch in _batches(job, training):
        begun = time.monotonic()
        _step(fault, training, batch)
        ends = training.attempt == 0 and job.stop_at == training.step
        if training.step % training.scale.checkpoint_every == 0 or asked_to_stop or ends:
            _save(job, training)
        if asked_to_stop:
            training.exporter.close("signal", 128 + signal.SIGTERM)
            sys.exit(128 + signal.SIGTERM)
        if ends:
            break
        if training.step % EVALUATE_EVERY == 0:
            _evaluate(job, fault, training)
        time.sleep(max(0.0, job.pace - (time.monotonic() - begun)))
    else:
        loss = held_out(job, training)
        if rank == 0:
            training.exporter.event("evaluation", dataset="held out", loss=loss)
            (job.root / "heldout.json").write_text(json.dumps({"step": training.step, "loss": repr(loss)}))
    training.exporter.close()
    if world > 1:
        dist.destroy_process_group()


def _made(job: Job, fault: Fault, rank: int, world: int) -> Training:
    scale = fault.scale(replace(SCALE, steps=job.steps))
    model = GPT(scale.context, scale.width, scale.layers, scale.heads)
    optimizer = torch.optim.AdamW(model.parameters(), lr=scale.lr, betas=BETAS, weight_decay=WEIGHT_DECAY)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda done: fault.rate(done, scale))
    spread = DistributedDataParallel(model) if world > 1 else model
    training = Training(spread, model, optimizer, scheduler, scale, rank, scaler=fault.scaler())
    exporter = training.exporter = Exporter(
        spread, optimizer, run=job.kind, dir=job.root / "runs", port=0, scaler=training.scaler, total_steps=scale.steps
    )
    text = Text(job.root / "train.bin", scale.context)
    shards = json.loads((job.root / "shards.json").read_text())
    rows: Any = text
    if "epoch" in job.values:
        rows, shards = Subset(text, range(job.values["epoch"] * scale.batch_size)), None
    wraps = fault.wraps()
    sampler: Any = None
    if not wraps:
        sampler = RandomSampler(rows, generator=torch.Generator().manual_seed(job.seed))
    elif world > 1 and fault.spreads():
        sampler = DistributedSampler(rows, drop_last=True)
    loader = DataLoader(rows, batch_size=scale.batch_size // world, drop_last=True, sampler=sampler)
    training.loader = loader
    if wraps:
        training.loader = exporter.wrap(
            loader,
            seed=job.seed,
            order="blocks" if shards else None,
            shards=shards,
            reserve=scale.reserve,
            dataset=DATASET,
        )
    fault.prepared(training)
    target = exporter.resume()
    if target is not None:
        state = torch.load(target.path, weights_only=True)
        _load(training, state)
        fault.loaded(training, state)
    exporter.resumed(training.step)
    training.attempt = exporter.attempt or 0
    return training


def _batches(job: Job, training: Training) -> Iterator[dict[str, Tensor]]:
    while True:
        for batch in training.loader:
            if training.step == training.scale.steps:
                return
            yield batch


def _step(fault: Fault, training: Training, batch: dict[str, Tensor]) -> None:
    step = training.step + 1
    fault.before(training, step)
    batch = fault.batch(training, step, batch)
    if not fault.wraps():
        training.exporter.batch(batch["input_ids"], batch["labels"])
    loss = _loss(training.model, batch)
    training.optimizer.zero_grad(set_to_none=True)
    scaler = training.scaler
    (loss if scaler is None else scaler.scale(loss)).backward()
    fault.gradients(training, step)
    if scaler is None:
        training.optimizer.step()
    else:
        scaler.step(training.optimizer)
        scaler.update()
    training.scheduler.step()
    fault.updated(training, step)
    training.step = step
    training.exporter.step(fault.told(training, step, loss))


def _loss(model: Any, batch: dict[str, Tensor]) -> Tensor:
    """Return the sum over the targets that count by their number, as trainers that weigh by tokens do."""
    logits, labels = model(batch["input_ids"]), batch["labels"].flatten()
    return F.cross_entropy(logits.flatten(0, 1), labels, reduction="sum") / (labels != -100).sum()


def _evaluate(job: Job, fault: Fault, training: Training) -> None:
    with training.exporter.phase("evaluation"):
        fault.evaluated(training)
        loss = held_out(job, training)
    training.exporter.event("evaluation", dataset="held out", loss=loss)


def held_out(job: Job, training: Training) -> float:
    """Return the mean loss over the held-out rows, in nats a byte."""
    text = Text(job.root / "heldout.bin", training.scale.context)
    rows = [text[at] for at in range(min(HELD_OUT_ROWS, len(text)))]
    training.core.eval()
    total = 0.0
    with torch.no_grad():
        for first in range(0, len(rows), AT_ONCE):
            part = rows[first : first + AT_ONCE]
            batch = {name: torch.stack([one[name] for one in part]) for name in ("input_ids", "labels")}
            total += _loss(training.core, batch).item() * len(part)
    training.core.train()
    return total / len(rows)


def _save(job: Job, training: Training) -> None:
    if training.rank != 0:
        return
    step = training.step
    path = job.root / "checkpoints" / f"attempt-{training.attempt}" / f"step-{step:06}.pt"
    path.parent.mkdir(parents=True, exist_ok=True)
    state = {
        "step": step,
        "model": training.core.state_dict(),
        "optimizer": training.optimizer.state_dict(),
        "scheduler": training.scheduler.state_dict(),
        "loader": training.loader.state_dict() if hasattr(training.loader, "state_dict") else None,
        "rng": torch.get_rng_state(),
    }
    draft = path.with_suffix(".writing")
    torch.save(state, draft)
    draft.replace(path)
    training.exporter.checkpoint(step, path)


def _load(training: Training, state: dict[str, Any]) -> None:
    training.core.load_state_dict(state["model"])
    training.optimizer.load_state_dict(state["optimizer"])
    training.scheduler.load_state_dict(state["scheduler"])
    training.loader.load_state_dict(state["loader"])
    torch.set_rng_state(state["rng"])
    training.step = state["step"]


if __name__ == "__main__":
    main(sys.argv[1])
