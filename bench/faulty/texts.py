"""The text of the runs: the standard library's own sources as the demo cuts them, with targets beside the inputs.

A row is ``2 · context`` numbers of 16 bits, the bytes that the model reads and the bytes that it must say, so that targets can be
wrong by themselves. ``NONE`` is a target that does not count. Another source, unlike the rest, is the tables of ``encodings``.
"""

from __future__ import annotations

import json
import sysconfig
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
import torch
from numpy.random import Generator
from torch import Tensor
from torch.utils.data import Dataset

from trainwarden.demo.corpus import build
from trainwarden.demo.poison import place
from trainwarden.demo.scale import Scale

Rows: TypeAlias = npt.NDArray[np.uint16]  # (rows, 2 * context)

#: A target that does not count, on disk; -100 for the loss.
NONE = 0xFFFF
DATASET = "stdlib"
#: Steps that a shard lasts, and the share of the other source in a mixed text.
SHARD_STEPS = (50, 62)
OTHER_SHARE = 8


class Text(Dataset[dict[str, Tensor]]):
    """Rows on disk as ``input_ids`` and ``labels``, int64 of ``context`` each."""

    def __init__(self, path: Path, context: int) -> None:
        self.rows: Rows = np.fromfile(path, dtype=np.uint16).reshape(-1, 2 * context)
        self.context = context

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        row = self.rows[index].astype(np.int64)
        row[row == NONE] = -100
        return {"input_ids": torch.from_numpy(row[: self.context]), "labels": torch.from_numpy(row[self.context :])}


def write(folder: Path, seed: int, fault: Any, scale: Scale, chance: Generator) -> tuple[int, int]:
    """Write the training rows of one run, spoil the shard that the fault spoils, and return its first and last step."""
    context = scale.context
    corpus = build(
        seed,
        rows=round(scale.steps * scale.batch_size / (1 - scale.reserve)) + SHARD_STEPS[1] * scale.batch_size,
        row_bytes=context + 1,
        shard_rows=(SHARD_STEPS[0] * scale.batch_size, SHARD_STEPS[1] * scale.batch_size),
    )
    other = _other(context + 1)
    if fault.mixed:
        at = np.random.default_rng((seed, 1)).permutation(len(corpus.rows))[: len(corpus.rows) // OTHER_SHARE]
        corpus.rows[at] = other[np.random.default_rng((seed, 2)).choice(len(other), len(at), replace=False)]
    rows, held_out = apart(corpus.rows), apart(corpus.held_out)
    shard, answer = place(corpus, seed, scale)
    fault.spoil(rows[shard.first : shard.end], apart(other), chance)
    folder.mkdir(parents=True, exist_ok=True)
    rows.tofile(folder / "train.bin")
    held_out.tofile(folder / "heldout.bin")
    (folder / "shards.json").write_text(json.dumps([[one.name, one.first, one.end] for one in corpus.shards]))
    return answer.first_step, answer.last_step


def apart(rows: npt.NDArray[np.uint8]) -> Rows:
    """Return rows of text as inputs and targets side by side."""
    return np.concatenate([rows[:, :-1], rows[:, 1:]], axis=1).astype(np.uint16)


def _other(row_bytes: int) -> npt.NDArray[np.uint8]:
    files = sorted((Path(sysconfig.get_paths()["stdlib"]) / "encodings").glob("*.py"))
    text = b"".join(path.read_bytes() for path in files)
    whole = len(text) // row_bytes * row_bytes
    return np.frombuffer(text[:whole], dtype=np.uint8).reshape(-1, row_bytes)
