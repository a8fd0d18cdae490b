"""Faults of the data: a shard that is no text, targets that are wrong or absent, a source in one block, a loader that stands still."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.random import Generator
from torch import Tensor

from .fault import Fault, Training
from .texts import NONE, Rows, apart


class Shard(Fault):
    """One shard after the middle of the run is spoilt; ``first`` and ``last`` are the steps that read it."""

    causes = ("data",)
    recoverable = True

    @classmethod
    def draw(cls, chance: Generator) -> dict[str, Any]:
        """Draw nothing: the place follows from the order of the shards."""
        return {}


class Repeats(Shard):
    """Long runs of one byte, with a little text in between."""

    name = "dirty_repeats"
    says = "a shard of long runs of one byte"

    def spoil(self, rows: Rows, other: Rows, chance: Generator) -> None:
        """Overwrite all but a tenth of the rows."""
        width = rows.shape[1] // 2 + 1
        lengths = chance.integers(80, 600, len(rows) * width // 80)
        stream = np.repeat(chance.integers(0, 256, len(lengths)), lengths)[: len(rows) * width]
        dirty = chance.random(len(rows)) < 0.9
        rows[dirty] = apart(stream.reshape(-1, width).astype(np.uint8))[dirty]


class Binary(Shard):
    """Bytes of a program or an archive."""

    name = "dirty_binary"
    says = "a shard of uniformly random bytes"

    def spoil(self, rows: Rows, other: Rows, chance: Generator) -> None:
        """Overwrite all rows."""
        width = rows.shape[1] // 2 + 1
        rows[:] = apart(chance.integers(0, 256, (len(rows), width), dtype=np.uint8))


class Digits(Shard):
    """Tables of numbers that follow from nothing."""

    name = "dirty_digits"
    says = "a shard of random digits"

    def spoil(self, rows: Rows, other: Rows, chance: Generator) -> None:
        """Overwrite all rows."""
        width = rows.shape[1] // 2 + 1
        rows[:] = apart((ord("0") + chance.integers(0, 10, (len(rows), width))).astype(np.uint8))


class LabelShift(Shard):
    """Targets are those of other positions, the inputs are as ever."""

    name = "label_shift"
    says = "a shard whose targets are several positions off"

    @classmethod
    def draw(cls, chance: Generator) -> dict[str, Any]:
        """Draw by how many positions."""
        return {"positions": int(chance.integers(3, 12))}

    def spoil(self, rows: Rows, other: Rows, chance: Generator) -> None:
        """Turn the targets of each row."""
        half = rows.shape[1] // 2
        rows[:, half:] = np.roll(rows[:, half:], self.values["positions"], axis=1)


class EmptyTargets(Shard):
    """Rows in which no target counts, as where a filter took all of them: the mean of nothing is no number."""

    name = "empty_targets"
    says = "batches without any target"

    @classmethod
    def draw(cls, chance: Generator) -> dict[str, Any]:
        """Draw which share of the shard has none, from its first row on."""
        return {"share": float(chance.uniform(0.3, 1.0))}

    def spoil(self, rows: Rows, other: Rows, chance: Generator) -> None:
        """Take the targets away."""
        rows[:, rows.shape[1] // 2 :] = NONE


class SourceBlock(Shard):
    """All of another source in one block in place of well mixed: what comes behind it has been forgotten."""

    name = "source_block"
    says = "a source that was not shuffled in: all of it in one block"
    reference = "mixed"

    def spoil(self, rows: Rows, other: Rows, chance: Generator) -> None:
        """Put rows of the other source here."""
        rows[:] = other[chance.choice(len(other), len(rows), replace=False)]


class StuckLoader(Fault):
    """The loader hands out one batch for ever."""

    name = "stuck_loader"
    says = "the same batch again and again"
    causes = ("data",)

    def batch(self, training: Training, step: int, batch: dict[str, Tensor]) -> dict[str, Tensor]:
        """Keep the first one."""
        kept: dict[str, Tensor] = training.kept.setdefault("batch", batch) if step >= self.first else batch
        return kept

    def wraps(self) -> bool:
        """Leave it unwrapped: a wrapped loader's positions would go on."""
        return False


KINDS: tuple[type[Fault], ...] = (Repeats, Binary, Digits, LabelShift, EmptyTargets, SourceBlock, StuckLoader)
