"""The demo's training script, and an example of one: an ordinary loop that can be watched, stopped and resumed.

What trainwarden needs is marked with ``# trainwarden``. The rest is what any script has that can continue from its own
checkpoints. It knows nothing of rollbacks: the exporter says from which checkpoint to resume, the wrapped loader leaves
out what a plan skips, and whoever started the script stops it with SIGTERM.

    python -m trainwarden.demo.train --data .demo/data --out .demo/run --run demo
"""

from __future__ import annotations

import argparse
import json
import signal
import sys
import threading
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from trainwarden.demo.corpus import read_index, read_rows
from trainwarden.demo.model import GPT
from trainwarden.demo.scale import OPTIONS, Scale
from trainwarden.exporter import Exporter  # trainwarden

WEIGHT_DECAY = 0.01
BETAS = (0.9, 0.999)  # torch's default: the second moment remembers a thousand steps
LAST_LR = 0.02  # of the peak, at the last step


class TextRows(Dataset[Tensor]):
    """Rows of ``context + 1`` bytes on disk; row i is a tensor of int64."""

    def __init__(self, path: Path, row_bytes: int, shards: list[tuple[str, int, int]]) -> None:
        self.rows = read_rows(path, row_bytes)
        self.shards = shards

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> Tensor:
        return torch.from_numpy(self.rows[index].astype(np.int64))


def text_rows(folder: str | Path = ".demo/data") -> TextRows:
    """Return the training rows of a demo: ``trainwarden data show --dataset trainwarden.demo.train:text_rows`` reads them."""
    index = read_index(Path(folder))
    return TextRows(Path(folder) / "train.bin", index.row_bytes, index.shards)


def main(arguments: list[str] | None = None) -> None:
    """Train until the last step, or until SIGTERM; exit code 143 after the latter."""
    options, scale = parse(arguments)
    torch.set_num_threads(options.threads)
    torch.manual_seed(options.seed)
    index = read_index(options.data)
    data = text_rows(options.data)
    held_out = torch.from_numpy(read_rows(options.data / "heldout.bin", index.row_bytes).astype(np.int64))

    model = GPT(scale.context, scale.width, scale.layers, scale.heads)
    optimizer = torch.optim.AdamW(model.parameters(), lr=scale.lr, betas=BETAS, weight_decay=WEIGHT_DECAY)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: lr_share(step, scale))
    exporter = Exporter(model, optimizer, run=options.run, port=options.port)  # trainwarden
    loader = exporter.wrap(  # trainwarden: any DataLoader; it now knows positions and shards, and can leave some out
        DataLoader(data, batch_size=scale.batch_size, drop_last=True),
        seed=options.seed,
        order="blocks",
        shards=data.shards,
        reserve=scale.reserve,
        dataset=index.dataset,
    )

    step = 0
    target = exporter.resume()  # trainwarden: which checkpoint to load
    if target is not None:
        step = load(Path(target.path), model, optimizer, scheduler, loader)
    exporter.resumed(step)  # trainwarden: after loading
    attempt, begun = exporter.attempt or 0, step

    asked_to_stop = threading.Event()
    signal.signal(signal.SIGTERM, lambda *_: asked_to_stop.set())

    def save() -> None:
        path = options.out / "checkpoints" / f"attempt-{attempt}" / f"step-{step:06}.pt"
        write(path, step, model, optimizer, scheduler, loader)
        exporter.checkpoint(step, path)  # trainwarden: reports that it is complete

    def tidy() -> None:
        for of_step, path in surplus(options.out / "checkpoints", attempt, begun, scale.keep_checkpoints):
            exporter.event("checkpoint", step=of_step, path=str(path.absolute()), deleted=True)  # trainwarden
            path.unlink()

    def save_apart(folder: Path) -> None:
        write(folder / "state.pt", step, model, optimizer, scheduler, loader)

    exporter.forensics(save_apart)  # trainwarden: where a daemon asks for it, a copy of the damaged state

    for batch in loader:
        if step == scale.steps:
            break
        loss = model.loss(batch)
        optimizer.zero_grad(set_to_none=True)
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        scheduler.step()
        step += 1
        exporter.step(loss)  # trainwarden: closes the step's record
        if step % 50 == 0:
            print(f"step {step:5}  loss {loss.item():.3f}", flush=True)
        if asked_to_stop.is_set():
            save()
            exporter.close("signal", 128 + signal.SIGTERM)  # trainwarden
            sys.exit(128 + signal.SIGTERM)
        if scale.checkpoint_every and step % scale.checkpoint_every == 0:
            save()
            tidy()

    with exporter.phase("evaluation"):
        held_out_loss = evaluate(model, held_out)
    exporter.event("evaluation", dataset="held out", loss=held_out_loss)
    write_json(options.out / "heldout.json", {"step": step, "loss": held_out_loss})
    print(f"step {step:5}  held-out loss {held_out_loss:.4f}", flush=True)
    exporter.close()  # trainwarden: also done at exit; here it waits for readers before the process says goodbye


def lr_share(step: int, scale: Scale) -> float:
    """Return the share of the peak rate at the update after ``step`` updates: linear warm-up, then linear decay."""
    if step < scale.warmup_steps:
        return (step + 1) / scale.warmup_steps
    done = (step - scale.warmup_steps) / max(1, scale.steps - scale.warmup_steps)
    return 1 - (1 - LAST_LR) * min(done, 1.0)


def evaluate(model: GPT, rows: Tensor, at_once: int = 32) -> float:
    """Return the mean loss over ``rows``, in nats a byte."""
    with torch.no_grad():
        losses = [model.loss(part).item() * len(part) for part in torch.split(rows, at_once)]
    return sum(losses) / len(rows)


def write(path: Path, step: int, model: Any, optimizer: Any, scheduler: Any, loader: Any) -> None:
    """Write a checkpoint, whole or not at all: all that the next step depends on, the loader's position included."""
    state = {
        "step": step,
        "model": model.state_dict(),
        "optimizer": optimizer.state_dict(),
        "scheduler": scheduler.state_dict(),
        "loader": loader.state_dict(),
        "rng": torch.get_rng_state(),
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    draft = path.with_suffix(".writing")
    torch.save(state, draft)
    draft.replace(path)


def surplus(folder: Path, attempt: int, begun: int, keep: int) -> list[tuple[int, Path]]:
    """Return the checkpoints that no rollback will ask for, with their steps.

    These are all but the newest ``keep`` of the line that this attempt continues from step ``begun``. What a line that was
    left behind wrote beyond that step counts for nothing, is never loaded again, and stays, to find out what happened to
    it. Nothing is surplus until this attempt has completed a checkpoint of its own, because until then a restart needs what
    it itself began from.
    """
    found = [
        (int(path.stem.removeprefix("step-")), int(path.parent.name.removeprefix("attempt-")), path)
        for path in folder.glob("attempt-*/step-*.pt")
    ]
    if not any(of == attempt for _, of, _ in found):
        return []
    line = sorted(one for one in found if one[1] == attempt or (one[1] < attempt and one[0] <= begun))
    return [(step, path) for step, _, path in line[:-keep]]


def load(path: Path, model: Any, optimizer: Any, scheduler: Any, loader: Any) -> int:
    """Load what :func:`write` wrote and return its step."""
    state = torch.load(path, weights_only=True)
    model.load_state_dict(state["model"])
    optimizer.load_state_dict(state["optimizer"])
    scheduler.load_state_dict(state["scheduler"])
    loader.load_state_dict(state["loader"])
    torch.set_rng_state(state["rng"])
    step: int = state["step"]
    return step


def write_json(path: Path, value: dict[str, Any]) -> None:
    """Write a small JSON file, whole or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    draft = path.with_suffix(".writing")
    draft.write_text(json.dumps(value) + "\n")
    draft.replace(path)


def parse(arguments: list[str] | None) -> tuple[argparse.Namespace, Scale]:
    """Read the command line."""
    parser = argparse.ArgumentParser(
        prog="python -m trainwarden.demo.train", description=(__doc__ or "").partition("\n")[0]
    )
    parser.add_argument("--data", type=Path, required=True, help="folder with train.bin, heldout.bin and index.json")
    parser.add_argument("--out", type=Path, required=True, help="folder for checkpoints and the held-out loss")
    parser.add_argument("--run", default="demo", help="name of the run")
    parser.add_argument("--seed", type=int, default=2, help="of the weights and of the order of the data")
    parser.add_argument("--port", type=int, default=None, help="of the exporter (default 17070; 0: any free one)")
    parser.add_argument("--threads", type=int, default=1, help="of torch")
    for name, kind in OPTIONS:
        parser.add_argument(f"--{name.replace('_', '-')}", type=kind, default=getattr(Scale(), name))
    options = parser.parse_args(arguments)
    return options, Scale(**{name: getattr(options, name) for name, _ in OPTIONS})


if __name__ == "__main__":
    main()
