"""A DataLoader that Accelerate prepared and goes on owning: its batches are numbered, its order stays its own.

Accelerate moves batches to the device, shares them out among the ranks and skips ahead when a run resumes, so its loader is not
rebuilt. Where its sampler is a function of a seed and the epoch (``SeedableRandomSampler``, a sequential one), position p of
an epoch is the p-th row that the sampler draws, and what a plan skips is replaced as it is drawn, so that every other
step keeps its batch and an epoch its length. Without a plan nothing is put in between.

Two ways to say what was handed out: iterate it (a loop of one's own), or :meth:`PreparedLoader.begin` and
:meth:`PreparedLoader.hand_out` (a trainer that iterates the loader itself).
"""

from __future__ import annotations

import sys
from bisect import bisect_left
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import islice
from typing import Any

import numpy as np
from torch.utils.data import BatchSampler, DataLoader, IterableDataset, RandomSampler, SequentialSampler

from trainwarden.ranges import within
from trainwarden.record import Ranges, ShardSpan

from .batches import Share
from .consumed import Consumed, Tally
from .drawn import Drawn, positions_of
from .permutation import Indices
from .ranges import RangeSet
from .rebuilt import DRAWN, told_of
from .shards import Shards
from .skips import Skips
from .streams import ranks, samples_in
from .watched import STATE_KEY, STATE_VERSION, read_state

#: Rows that are drawn and looked at together, and a batch from more shards than this names none (as elsewhere in here).
_CHUNK, _MOST_SHARDS = 8192, 32


def _its() -> Any:
    """Return Accelerate's module of loaders. Whoever has a prepared loader has it loaded; nobody else needs it."""
    from accelerate import data_loader

    return data_loader


def is_prepared(loader: Any) -> bool:
    """Say whether Accelerate prepared this loader. Where Accelerate was never imported, it did not."""
    its = sys.modules.get("accelerate.data_loader")
    return its is not None and type(loader) in (its.DataLoaderShard, its.DataLoaderDispatcher)


@dataclass(frozen=True, slots=True)
class Cut:
    """How a loader cuts its data set. ``batch`` is samples of one rank and batch, 0 where nobody says.

    ``draws_from`` is the batch sampler that holds ``sampler``. ``why`` says why positions cannot be replayed, None: they can.
    """

    rows: int | None
    batch: int
    rank: int
    world: int
    draws_from: Any
    sampler: Any
    why: str | None


def read_cut(loader: Any) -> Cut:
    """Read how a prepared loader cuts its data set."""
    rank, world = ranks()
    if not is_prepared(loader) and not isinstance(loader, DataLoader):
        return Cut(None, 0, rank, world, None, None, f"{type(loader).__name__} is no DataLoader")
    if isinstance(loader.dataset, IterableDataset):
        return Cut(None, loader.batch_size or 0, rank, world, None, None, "its data set is iterable")
    rows = len(loader.dataset)
    inner, split = loader.batch_sampler, 1
    if type(inner) is _its().BatchSamplerShard:
        rank, world = inner.process_index, inner.num_processes
        split = world if inner.split_batches else 1
        inner = inner.batch_sampler
    if type(inner) is not BatchSampler:
        made_by = f"its batches come from a {type(inner).__name__}"
        return Cut(rows, loader.batch_size or 0, rank, world, None, None, made_by)
    sampler = inner.sampler
    if type(sampler) is SkippingSampler:  # of an earlier exporter around the same loader
        sampler = inner.sampler = sampler.inner
    why = _why_not(sampler, rows)
    if type(loader) is _its().DataLoaderDispatcher:
        why = why or "one rank reads for all of them (dispatch_batches)"
    elif world > 1 and not is_prepared(loader):
        why = why or "it was not prepared by Accelerate, so that nobody knows which part each rank reads"
    elif not loader.in_order:
        why = why or "in_order=False: batches out of order have no position"
    return Cut(rows, inner.batch_size // split, rank, world, inner, sampler, why)


def _why_not(sampler: Any, rows: int) -> str | None:
    kind = type(sampler)
    if kind is SequentialSampler:
        return None
    if kind not in (_its().SeedableRandomSampler, RandomSampler):
        return f"its samples come from a {kind.__name__}"
    if sampler.replacement or sampler.num_samples != rows:
        return f"its {kind.__name__} draws with replacement or not the whole data set"
    if kind is RandomSampler:
        return "its RandomSampler has no seed of its own (Accelerate's use_seedable_sampler gives it one)"
    return None


def _is_seeded(sampler: Any) -> bool:
    return isinstance(sampler, _its().SeedableRandomSampler)


class SkippingSampler:
    """Draws what another sampler draws, with other rows where the data must not be trained on.

    ``epoch`` is the one to draw next. ``replaced`` holds the positions replaced so far in the two newest epochs, in parts that rise.
    """

    def __init__(self, inner: Any, drawn: Drawn) -> None:
        self.inner = inner
        self.epoch = 0
        self.replaced: OrderedDict[int, list[Indices]] = OrderedDict()
        self._drawn = drawn

    def __len__(self) -> int:
        return len(self.inner)

    def set_epoch(self, epoch: int) -> None:
        """Do nothing: some versions of Accelerate count from 0 again behind a skip. :attr:`epoch` is what counts."""

    def __iter__(self) -> Iterator[int]:
        epoch, position = self.epoch, 0
        if _is_seeded(self.inner):
            self.inner.set_epoch(epoch)
        drawn = iter(self.inner)
        noted = self.replaced[epoch] = []
        while len(self.replaced) > 2:
            self.replaced.popitem(last=False)
        while chunk := list(islice(drawn, _CHUNK)):
            positions = np.arange(position, position + len(chunk))
            rows, here = self._drawn.replace(epoch, positions, np.array(chunk, dtype=np.int64))
            if here.any():
                noted.append(positions[here])
            yield from rows.tolist()
            position += len(chunk)

    def count(self, epoch: int, ranges: Ranges) -> int:
        """Return how many of these positions of an epoch were replaced."""
        parts, count = self.replaced.get(epoch, []), 0
        for first, end in RangeSet(ranges).ranges:
            at = bisect_left(parts, first, key=lambda part: int(part[-1]))  # of many parts, only those that it touches
            while at < len(parts) and parts[at][0] < end:
                count += int(np.count_nonzero((parts[at] >= first) & (parts[at] < end)))
                at += 1
        return count


class PreparedLoader:
    """See :class:`trainwarden.exporter.loader.WatchedLoader`. Attributes of the prepared loader can be read through it.

    ``reserve`` is the share of the rows from which stand-ins are drawn; they stay in the order, too. Where the loader's
    RandomSampler has no seed of its own, giving ``order_seed`` gives it one.
    """

    def __init__(
        self,
        loader: Iterable[Any],
        *,
        skips: Skips,
        order_seed: int | None = None,
        shards: Iterable[Any] | None = None,
        reserve: float = 0.01,
        dataset: str | None = None,
    ) -> None:
        self._loader: Any = loader
        self._cut = read_cut(loader)
        if order_seed is not None and type(self._cut.sampler) is RandomSampler:
            seeded = _its().SeedableRandomSampler(self._cut.sampler.data_source, data_seed=order_seed)
            self._cut.draws_from.sampler = seeded
            self._cut = read_cut(loader)
        self.notices: list[str] = []
        self.refused: dict[str, str] = {}
        self.can_skip: frozenset[str] = frozenset()
        self.dataset_name = dataset
        self._skips, self._reserve = skips, reserve
        self._epoch, self._position, self._begun, self._passes = 0, 0, False, 0
        self._tally = Tally()
        self._drawn: Drawn | None = None
        self._skipping: SkippingSampler | None = None
        self._shards: Shards | None = None
        cut = self._cut
        self.replayable = cut.why is None and cut.rows is not None
        self.kind = "map" if self.replayable else "iterable"
        if cut.rows is not None and self.replayable:
            self._shards = None if shards is None else Shards(shards, cut.rows)
            self._draw(cut.rows)
        else:
            self.notices.append(f"loader: positions only, not replayable and without skips: {cut.why}")
            asked = {"skip_samples": skips.skips, "exclude": skips.exclude}
            self.refused = {name: f"this loader cannot skip: {cut.why}" for name, given in asked.items() if given}

    def _draw(self, rows: int) -> None:
        """Work out what is drawn with the sampler's seed as it is now, and stand between where something is replaced."""
        cut = self._cut
        self._drawn = Drawn(
            rows,
            self.order_seed,
            step=cut.batch * cut.world,
            reserve=self._reserve,
            shards=self._shards,
            dataset=self.dataset_name,
            skips=self._skips,
        )
        self.can_skip, self.refused, self.notices = self._drawn.can_skip, self._drawn.refused, self._drawn.notices
        self._skipping = SkippingSampler(cut.sampler, self._drawn) if self._drawn.replaces else None
        cut.draws_from.sampler = self._skipping or cut.sampler

    @property
    def told(self) -> dict[str, Any] | None:
        """What a start event says of the loader: everything that its rows are a function of; None where they are of none."""
        if self._drawn is None:
            return None
        share = Share(self._cut.batch, self._cut.rank, self._cut.world)
        known = told_of(DRAWN, seed=0, reserve=self._reserve, share=share, shards=self._shards, skips=self._skips)
        return {**known, "seed": self.order_seed}

    @property
    def epoch(self) -> int:
        """Epoch of the last batch handed out, or of the first to come."""
        return self._epoch

    @property
    def batch_size(self) -> int | None:
        """Samples of one rank in a batch; None where the loader does not say."""
        return self._cut.batch or None

    @property
    def dataset_size(self) -> int | None:
        """Rows of the data set; None where it does not say."""
        return self._cut.rows

    @property
    def order_seed(self) -> int | None:
        """Seed that the order of the epochs is a function of; None where it is not."""
        sampler = self._cut.sampler
        return int(sampler.initial_seed) if _is_seeded(sampler) else None

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        return getattr(self._loader, name)

    def __len__(self) -> int:
        return len(self._loader)

    def __iter__(self) -> Iterator[Any]:
        if self._begun:
            self._epoch, self._position, self._begun = self._epoch + 1, 0, False
        self._passes += 1
        loader, step = self._loader, self._cut.batch * self._cut.world
        if self._position and step:
            gone = -(-self._position // step)
            if self._cut.rows is not None and gone >= len(loader):  # some versions hand out None where nothing is left
                return self._pass(self._passes, iter(()))
            loader = _its().skip_first_batches(loader, gone)
        for each in (self._loader, loader):
            if is_prepared(each):
                each.set_epoch(self._epoch)
        if _is_seeded(self._cut.sampler):  # which set_epoch does not reach behind a skip
            self._cut.sampler.set_epoch(self._epoch)
        if self._skipping is not None:
            self._skipping.epoch = self._epoch
        return self._pass(self._passes, iter(loader))

    def _pass(self, number: int, batches: Iterator[Any]) -> Iterator[Any]:
        for batch in batches:
            if number == self._passes:
                self.hand_out(batch)
            yield batch
        if number == self._passes:
            self._epoch, self._position, self._begun = self._epoch + 1, 0, False

    def set_epoch(self, epoch: int) -> None:
        """Let the next pass be this epoch; from its beginning, unless the loaded position lies in it."""
        if self._begun or epoch != self._epoch:
            self._epoch, self._position, self._begun = int(epoch), 0, False

    def begin(self, epoch: int, batches: int) -> None:
        """Say that a pass over ``epoch`` begins behind its first ``batches`` batches of each rank."""
        self._epoch, self._begun = epoch, False
        self._position = batches * self._cut.batch * self._cut.world
        if self._cut.rows is not None:
            self._position = min(self._position, self._cut.rows)
        if self._skipping is not None:
            self._skipping.epoch = epoch

    @property
    def misread(self) -> str | None:
        """Say what is wrong with an order that is being read and is not that of the epoch; None where nothing is.

        Behind ``skip_first_batches`` some versions of Accelerate begin to count epochs from 0 again.
        """
        sampler = self._cut.sampler
        if not _is_seeded(sampler) or sampler.epoch in (
            self._epoch,
            self._epoch + 1,
        ):  # it counts on where it is exhausted
            return None
        return (
            f"loader: what is left of epoch {self._epoch} is read in the order of epoch {sampler.epoch}: this version of Accelerate "
            "forgets the epoch where a run goes on in the middle of one. Positions and data do not agree until the next; upgrade it"
        )

    def hand_out(self, batch: Any) -> None:
        """Count a batch that the trainer was handed."""
        size = samples_in(batch)
        size = self._cut.batch if size is None else size
        first, rows = self._position + self._cut.rank * size, self._cut.rows
        self._position, self._begun = self._position + size * self._cut.world, True
        samples: Ranges = [(first, first + size)] if size else []
        if rows is not None:  # the last step of an epoch is filled up from its beginning
            self._position = min(self._position, rows)
            samples = [*within(samples, 0, rows), *_wrapped(samples, rows)]
        self._tally.add(
            batch,
            epoch=self._epoch,
            position=self._position,
            samples=samples,
            count=size,
            shards=self._spans(samples),
            substituted=0 if self._skipping is None else self._skipping.count(self._epoch, samples),
        )

    def _spans(self, samples: Ranges) -> list[ShardSpan]:
        if self._shards is None:
            return []
        positions = positions_of(RangeSet(samples), self._cut.rows or 0)
        of = self._shards.of(self.rows(self._epoch, positions))
        spans = []
        for number in np.unique(of[of >= 0]):
            here, shard = positions[of == number], self._shards.all[number]
            extent = (int(here.min()), int(here.max()) + 1)
            if type(self._cut.sampler) is SequentialSampler:
                extent = (shard.first, shard.end)
            spans.append(ShardSpan(shard.name, *extent))
        return sorted(spans, key=lambda span: span.first) if len(spans) <= _MOST_SHARDS else []

    def rows(self, epoch: int, positions: Any) -> Any:
        """Return the rows of the data set at positions of an epoch's unskipped order, as an int64 array.

        Raises:
            LookupError: the order is the sampler's own.
        """
        if self._drawn is None:
            raise LookupError(f"nobody can say which rows these were: {self._cut.why}")
        return self._drawn.order(epoch, np.asarray(positions, dtype=np.int64))

    def state_dict(self) -> dict[str, Any]:
        """Return the position after the last batch handed out, for a checkpoint."""
        return {
            STATE_KEY: STATE_VERSION,
            "kind": self.kind,
            "dataset_size": self._cut.rows,
            "shuffled": self.order_seed is not None,
            "seed": self.order_seed,
            "epoch": self._epoch,
            "position": self._position,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue after the position of ``state``; raises LoaderStateError where the data would be other data."""
        epoch, position = read_state(
            state, self.kind, {"dataset_size": self._cut.rows, "shuffled": self.order_seed is not None}
        )
        if state.get("seed") not in (None, self.order_seed) and self._cut.rows is not None:
            self._cut.sampler.initial_seed = state["seed"]
            self._draw(self._cut.rows)
        self._epoch, self._position, self._begun = epoch, position, False
        self._passes += 1

    def consumed(self) -> Consumed | None:
        """Return what was handed out since the last call, or None; lets go of the batches."""
        return self._tally.take()


def _wrapped(samples: Ranges, rows: int) -> Ranges:
    """Return what lies beyond the last position, counted from the first again."""
    return [(max(first - rows, 0), min(end - rows, rows)) for first, end in samples if end > rows]
