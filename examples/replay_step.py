"""A step that broke a run, made again bit by bit: train with a poisoned shard, keep the damaged state, and go through it at leisure.

    python examples/replay_step.py train [steps]       # a run that lets a copy of its damaged state be asked for
    python examples/replay_step.py replay FOLDER       # FOLDER: .trainwarden/replay-step/quarantine/incident-ID

Under ``trainwarden supervise``, with a receiver and a daemon whose ``policy`` has ``quarantine: true`` beside it, the first one is asked for a
copy when the incident is confirmed (docs/forensics.md has the commands). The second one begins at the last checkpoint before the incident,
reads exactly the batches that the run read, and compares: the loss and the gradient norm of every step are those of the record, and the state
at the end is the copy's.
"""

from __future__ import annotations

import sys
import sysconfig
import tempfile
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from trainwarden.exporter import Exporter
from trainwarden.exporter.forensics import load
from trainwarden.record import Step, decode_lines
from trainwarden.runfolder import RunFolder

LENGTH, WIDTH, BATCH, EVERY = 32, 64, 16, 25
FILES = (
    "argparse",
    "ast",
    "calendar",
    "codecs",
    "difflib",
    "dis",
    "doctest",
    "ftplib",
    "inspect",
    "mailbox",
    "optparse",
    "pdb",
)
POISONED, RUN, CHECKPOINTS = "calendar", "replay-step", Path(".replay-step")


class GPT(nn.Module):
    """A small model of bytes, with dropout: to make a step again takes the random numbers, too."""

    def __init__(self) -> None:
        super().__init__()
        self.token, self.place = nn.Embedding(256, WIDTH), nn.Embedding(LENGTH, WIDTH)
        layers = (
            nn.TransformerEncoderLayer(WIDTH, 4, 4 * WIDTH, 0.1, "gelu", batch_first=True, norm_first=True)
            for _ in "12"
        )
        self.blocks = nn.ModuleList(layers)
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 256, bias=False)

    def forward(self, ids: Tensor) -> Tensor:
        """Return the logits ``(rows, time, 256)`` of what comes next after ``ids`` ``(rows, time)``."""
        x = self.token(ids) + self.place(torch.arange(ids.shape[1]))
        for block in self.blocks:
            x = block(x, src_mask=nn.Transformer.generate_square_subsequent_mask(ids.shape[1]), is_causal=True)
        logits: Tensor = self.head(self.norm(x))
        return logits


def make() -> tuple[GPT, torch.optim.Optimizer, DataLoader[Any], list[tuple[str, int, int]]]:
    """Return model, optimizer, loader and shards: the same ones in every process."""
    torch.set_num_threads(1)  # sums of floats depend on how many threads add them up
    torch.manual_seed(0)
    rows: list[Tensor] = []
    shards = []
    noise = torch.Generator().manual_seed(1)
    for name in FILES:
        text = torch.tensor(list((Path(sysconfig.get_path("stdlib")) / f"{name}.py").read_bytes()))
        found = list(text[: len(text) // (LENGTH + 1) * (LENGTH + 1)].view(-1, LENGTH + 1))
        if name == POISONED:  # bytes that no text has, a new run of them in each row
            found = [torch.randint(128, 256, (1,), generator=noise).expand(LENGTH + 1).clone() for _ in found]
        shards.append((name, len(rows), len(rows) + len(found)))
        rows += found
    model = GPT()
    loader: DataLoader[Any] = DataLoader(rows, batch_size=BATCH, drop_last=True)  # type: ignore[arg-type]
    return model, torch.optim.AdamW(model.parameters(), lr=2e-3), loader, shards


def update(model: GPT, optimizer: torch.optim.Optimizer, exporter: Exporter, batch: Tensor) -> None:
    """Make one step."""
    loss = nn.functional.cross_entropy(model(batch[:, :-1]).flatten(0, 1), batch[:, 1:].flatten())
    optimizer.zero_grad()
    loss.backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    exporter.step(loss)


def train(steps: int = 1000) -> None:
    """Train; checkpoints lie in ``.replay-step``."""
    model, optimizer, loader, shards = make()
    exporter = Exporter(model, optimizer, run=RUN, port=0)
    loader = exporter.wrap(loader, seed=9, order="blocks", shards=shards, dataset="stdlib")
    exporter.resumed(0)

    def save(folder: Path) -> None:
        torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, folder / "state.pt")

    exporter.forensics(save)  # a copy of the damaged state may be asked for
    while exporter.global_step < steps:
        for batch in loader:
            update(model, optimizer, exporter, batch)
            step = exporter.global_step
            if step % EVERY == 0:
                folder = CHECKPOINTS / f"step-{step}"
                folder.mkdir(parents=True, exist_ok=True)
                with exporter.phase("checkpoint"):
                    save(folder)
                exporter.checkpoint(step, folder)
                print(f"step {step}", flush=True)
            if step >= steps:
                break
    exporter.close()


def replay(folder: str) -> bool:
    """Make the steps from the last good checkpoint to the damaged state again; say whether they are the same, bit by bit."""
    found = load(folder)
    if found.last_good is None:
        raise SystemExit(f"{folder}: no checkpoint was there to go back to")
    model, optimizer, loader, _ = make()
    state = torch.load(Path(found.last_good.path) / "state.pt", weights_only=True)
    model.load_state_dict(state["model"])
    optimizer.load_state_dict(state["optimizer"])
    with tempfile.TemporaryDirectory() as aside:  # watched as the run was, in a folder of its own
        exporter = Exporter(model, optimizer, run=RUN, port=0, dir=aside, reader_seconds=0)
        exporter.resumed(found.last_good.step)
        found.restore_random(found.last_good.step)
        for _, batches in found.batches(loader, found.last_good.step + 1, found.step):
            exporter.batch(batches[0])
            update(model, optimizer, exporter, batches[0])
        exporter.close()
        lines = [line for path in RunFolder(RUN, Path(aside)).journal_files() for line in decode_lines(path.open("rb"))]
    alike = True
    for made in (line for line in lines if isinstance(line, Step)):
        seen = found.seen(made.step)
        same = all(seen.number(name) == made.value(name) for name in ("loss", "grad_norm"))
        alike = alike and same
        mark = " <- suspect" if made.step == found.suspect_step else ""
        shards = ", ".join(span.name for span in seen.shards)
        print(
            f"step {made.step:5}  loss {seen.loss}  grad norm {seen.grad_norm}  {'same' if same else 'DIFFERS'}  {shards}{mark}"
        )
    copy = torch.load(found.checkpoint / "state.pt", weights_only=True)
    end = all(torch.equal(value, copy["model"][name]) for name, value in model.state_dict().items())
    print(f"the state after step {found.step} is {'the copy, bit by bit' if end else 'ANOTHER than the copy'}")
    return alike and end


if __name__ == "__main__":
    if sys.argv[1:2] == ["train"]:
        train(*(int(argument) for argument in sys.argv[2:]))
    elif sys.argv[1:2] == ["replay"] and len(sys.argv) == 3:
        sys.exit(0 if replay(sys.argv[2]) else 1)
    else:
        sys.exit((__doc__ or "").split("\n\n")[1])
