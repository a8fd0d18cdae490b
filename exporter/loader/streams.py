"""What a loader that is passed through as it is has in common: samples are counted as batches go by.

Without a sampler of ours the order belongs to the loader. With several ranks, batch k of rank r is numbered as if ranks
took turns, which is the global order exactly where all of them get batches of one size.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.distributed

from trainwarden.record import Ranges

from .consumed import Consumed, Tally


def ranks() -> tuple[int, int]:
    """Return this process' (rank, world size); (0, 1) outside of torch.distributed."""
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        return torch.distributed.get_rank(), torch.distributed.get_world_size()
    return 0, 1


def samples_in(batch: Any) -> int | None:
    """Return the length of the first dimension of the first tensor or array in a batch, from its shape alone.

    None where there is none: a batch without tensors is one whose samples nobody can count, and so is one that raises when it is
    looked at, which is no matter of whoever draws it.
    """
    try:
        return _first_dimension(batch)
    except Exception:
        return None


def _first_dimension(batch: Any) -> int | None:
    shape = getattr(batch, "shape", None)
    if shape is not None:
        return int(shape[0]) if len(shape) else None
    parts: Iterable[Any] = ()
    if isinstance(batch, Mapping):
        parts = batch.values()
    elif isinstance(batch, Sequence) and not isinstance(batch, str | bytes):
        parts = batch
    elif hasattr(batch, "__dataclass_fields__"):
        parts = vars(batch).values()
    for part in parts:
        found = _first_dimension(part)
        if found is not None:
            return found
    return None


class Stream:
    """A loader passed through, with its samples counted. Its kinds say what else they can do."""

    kind = "iterable"
    replayable = False
    can_skip: frozenset[str] = frozenset()

    def __init__(self, loader: Iterable[Any], *, dataset: str | None, rank: int | None, world: int | None) -> None:
        own_rank, own_world = ranks()
        self._rank = own_rank if rank is None else rank
        self._world = own_world if world is None else world
        self._inner = loader
        self.notices: list[str] = []
        self.refused: dict[str, str] = {}
        self.dataset_name = dataset
        self._epoch = 0
        self._position = 0
        self._begun = False
        self._tally = Tally()
        self._passes = 0

    @property
    def epoch(self) -> int:
        """Epoch of the last batch handed out, or of the first to come."""
        return self._epoch

    @property
    def batch_size(self) -> int | None:
        """Samples of one rank in a batch; None where the loader does not say."""
        size = getattr(self._inner, "batch_size", None)
        return size if isinstance(size, int) else None

    @property
    def dataset_size(self) -> int | None:
        """Rows of the data set; None where it does not say."""
        try:
            return len(self._inner.dataset)  # type: ignore[attr-defined]  # any loader may have one, of any kind
        except (AttributeError, TypeError, NotImplementedError):
            return None

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        return getattr(self._inner, name)

    def __len__(self) -> int:
        return len(self._inner)  # type: ignore[arg-type]  # a loader without a length raises TypeError, as it did unwrapped

    def __bool__(self) -> bool:  # what has no length is true, as it was unwrapped
        return bool(self._inner)

    def __iter__(self) -> Iterator[Any]:
        batches = iter(self._inner)
        if self._begun and batches is not self._inner:  # an iterator goes on where it is: that is no new epoch
            self._epoch, self._position, self._begun = self._epoch + 1, 0, False
        self._passes += 1
        return _StreamPass(self, self._passes, batches)

    def place(self, epoch: int, position: int) -> None:
        """Number what comes next from here on, also in a pass that is open. Which data that is, is up to the loader."""
        self._epoch, self._position, self._begun = int(epoch), int(position), False

    def set_epoch(self, epoch: int) -> None:
        """Let the next pass be this epoch, from its beginning unless the loaded position lies in it; the loader is told, too."""
        if self._begun or epoch != self._epoch:
            self.place(epoch, 0)
        inner = getattr(self._inner, "set_epoch", None)
        if callable(inner):
            inner(epoch)

    def consumed(self) -> Consumed | None:
        """Return what was handed out since the last call, or None; lets go of the batches."""
        return self._tally.take()

    def next_batch(self, number: int, batches: Iterator[Any]) -> Any:
        """Return the next batch of a pass that is not skipped; only the newest pass is counted."""
        while True:
            try:
                batch = next(batches)
            except StopIteration:
                if number == self._passes:
                    self._epoch, self._position, self._begun = self._epoch + 1, 0, False
                    self._passes += 1
                raise
            if number != self._passes:
                return batch
            size = samples_in(batch)
            size = (self.batch_size or 1) if size is None else size
            first = self._position + self._rank * size
            step_first, self._position, self._begun = self._position, self._position + size * self._world, True
            if self._is_skipped(step_first, self._position):
                continue
            samples: Ranges = [(first, first + size)] if size else []
            self._tally.add(batch, epoch=self._epoch, position=self._position, samples=samples, count=size)
            return batch

    def _is_skipped(self, first: int, end: int) -> bool:
        """Say whether the step at these positions of the current epoch is to be dropped."""
        return False


class _StreamPass:
    """One pass over a stream."""

    def __init__(self, owner: Stream, number: int, batches: Iterator[Any]) -> None:
        self._owner = owner
        self._number = number
        self._batches = batches

    def __iter__(self) -> _StreamPass:
        return self

    def __next__(self) -> Any:
        return self._owner.next_batch(self._number, self._batches)
