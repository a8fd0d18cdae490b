"""A map-style DataLoader, rebuilt around our batch sampler: exact resume with any number of workers, every kind of skip.

The position counts what the trainer was handed; what workers fetched ahead is fetched again after a resume. What a
data set draws at random while it reads a row is its own affair and not replayed.
"""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Iterator, Mapping, Sized
from dataclasses import dataclass
from typing import Any, cast
from zlib import crc32

import numpy as np
import torch
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
)

from trainwarden.orderkey import key

from .batches import Batch, Batches, Share
from .consumed import Consumed, Tally
from .order import OrderFunction, make_order
from .rebuilt import told_of
from .shards import Shards
from .skips import Refusals, Skips, excluded_rows
from .watched import STATE_KEY, STATE_VERSION, LoaderStateError, read_state

_WORKER_SEEDS = 0x776F726B657273


@dataclass(frozen=True, slots=True)
class Blueprint:
    """How a DataLoader cuts its data set: what our sampler must do in place of its own. ``batched``: it collates batches."""

    order: str | OrderFunction
    share: Share
    batched: bool
    notices: tuple[str, ...] = ()


def read_blueprint(loader: DataLoader[Any], order: str | OrderFunction | None) -> Blueprint | str:
    """Read how a DataLoader samples; a sentence says why it cannot be reproduced.

    An explicit ``order`` replaces the loader's own sampler, whatever that is.
    """
    if type(loader) is not DataLoader:
        return f"{type(loader).__name__} is a DataLoader of its own kind, which cannot be rebuilt"
    if isinstance(loader.dataset, IterableDataset):
        return "its data set is iterable"
    try:
        rows = len(cast(Sized, loader.dataset))
    except (TypeError, NotImplementedError):
        return "its data set has no length"
    if not rows:
        return "its data set is empty"
    batch_sampler = loader.batch_sampler
    sampler: Any = loader.sampler
    batch_size, drop_last = 1, False
    if batch_sampler is not None:
        if type(batch_sampler) is not BatchSampler:
            return f"its batches come from a {type(batch_sampler).__name__}"
        sampler = batch_sampler.sampler
        batch_size, drop_last = batch_sampler.batch_size, batch_sampler.drop_last
    rank, world, drop_uneven = 0, 1, False
    follows: str | None = None
    why = f"its samples come from a {type(sampler).__name__}"
    if type(sampler) is SequentialSampler:
        follows = "sequential"
    elif type(sampler) is RandomSampler:
        follows = "shuffle"
        if sampler.replacement or sampler.num_samples != rows:
            follows, why = None, "its RandomSampler draws with replacement or not the whole data set"
    elif type(sampler) is DistributedSampler:
        follows = "shuffle" if sampler.shuffle else "sequential"
        rank, world, drop_uneven = sampler.rank, sampler.num_replicas, sampler.drop_last
    if follows is not None and type(sampler) is not DistributedSampler and len(sampler) != rows:
        follows, why = None, f"its {type(sampler).__name__} covers {len(sampler)} of {rows} rows"
    chosen = order if order is not None else follows
    if chosen is None:
        return why
    notices = []
    if follows is None:
        notices.append(f"loader: {why}; the order given to wrap() takes its place")
    if not getattr(loader, "in_order", True):
        notices.append("loader: in_order=False was set aside: batches out of order have no position")
    share = Share(batch_size, rank, world, drop_last, drop_uneven)
    return Blueprint(chosen, share, batch_sampler is not None, tuple(notices))


class MapStyleLoader:
    """See :class:`trainwarden.exporter.loader.WatchedLoader`. Attributes of the rebuilt DataLoader can be read through it."""

    kind = "map"
    replayable = True

    def __init__(
        self,
        loader: DataLoader[Any],
        blueprint: Blueprint,
        *,
        seed: int,
        shards: Shards | None,
        reserve: float,
        dataset: str | None,
        skips: Skips,
    ) -> None:
        rows = len(cast(Sized, loader.dataset))
        share = blueprint.share
        self.notices = list(blueprint.notices)
        self.dataset_name = dataset
        self._dataset_size = rows
        self._share = share
        order, held_back = make_order(
            blueprint.order, rows, shards=shards, seed=seed, share=reserve, batch=share.batch_size * share.world
        )
        refusals = Refusals()
        excluded = excluded_rows(skips.exclude, dataset, shards, refusals, rows)
        self._order = order
        self._batches = Batches(order, held_back, shards, skips, excluded, share)
        able = {"shift"}
        if self._batches.can_substitute:
            able.add("substitute")
        if dataset is not None and shards is not None:
            able.add("exclude")
        self.can_skip = frozenset(able)
        modes = {skip.mode for skip in skips.skips} | {entry.mode for entry in skips.exclude}
        if "substitute" in modes and not self._batches.can_substitute:
            why = "the reserve is empty" if not len(held_back) else "every reserved row is excluded"
            refusals.add("skip_mode", f"{why}: skipped positions are shifted over, not substituted")
        wanted = max((sum(end - first for first, end in skip.ranges) for skip in skips.skips), default=0)
        if self._batches.can_substitute and wanted > held_back.usable:
            self.notices.append(
                f"loader: {wanted} skipped positions are filled from a reserve of {held_back.usable} rows, some more than once"
            )
        self.refused = refusals.reasons
        self._identity = {
            "seed": seed,
            "order": order.name,
            "dataset_size": rows,
            "reserve": len(held_back),
            "shards": _digest(shards) if order.name == "blocks" else None,
        }
        self.told = told_of(blueprint.order, seed=seed, reserve=reserve, share=share, shards=shards, skips=skips)
        self._seed = seed
        self._epoch = 0
        self._position = 0
        self._begun = False
        self._tally = Tally()
        self._passes = 0
        self._sampler = _Sampler(self)
        self._own_generator = torch.Generator() if loader.generator is None else None
        self._inner = _rebuilt(loader, self._sampler, blueprint.batched, self._own_generator)

    @property
    def epoch(self) -> int:
        """Epoch of the last batch handed out, or of the first to come."""
        return self._epoch

    @property
    def batch_size(self) -> int | None:
        """Samples of one rank in a batch; None where the loader does not say."""
        return self._share.batch_size

    @property
    def dataset_size(self) -> int | None:
        """Rows of the data set; None where it does not say."""
        return self._dataset_size

    @property
    def sampler(self) -> _Sampler:
        """The sampler, for trainers that call ``loader.sampler.set_epoch(epoch)``."""
        return self._sampler

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        return getattr(self._inner, name)

    def __len__(self) -> int:
        return self._batches.count(self._epoch)

    def __iter__(self) -> Iterator[Any]:
        if self._begun:
            self._epoch, self._position, self._begun = self._epoch + 1, 0, False
        if self._own_generator is not None:
            # Workers are seeded from here, not from the global generator: restoring that one restores the run.
            self._own_generator.manual_seed(key(self._seed, _WORKER_SEEDS, self._epoch) >> 1)
        self._passes += 1
        cuts: deque[Batch] = deque()
        self._sampler.follow(self._batches.begin(self._epoch, self._position), cuts)
        return _Pass(self, self._passes, self._epoch, iter(self._inner), cuts)

    def set_epoch(self, epoch: int) -> None:
        """Let the next pass be this epoch; from its beginning, unless the loaded position lies in it."""
        if self._begun or epoch != self._epoch:
            self._epoch, self._position, self._begun = int(epoch), 0, False

    def rows(self, epoch: int, positions: Any) -> Any:
        """Return the rows of the data set at positions of an epoch's unskipped order, as an int64 array."""
        return self._order.rows(epoch, np.asarray(positions, dtype=np.int64))

    def state_dict(self) -> dict[str, Any]:
        """Return the position after the last batch handed out, for a checkpoint."""
        return {
            STATE_KEY: STATE_VERSION,
            "kind": self.kind,
            **self._identity,
            "epoch": self._epoch,
            "position": self._position,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue after the position of ``state``; raises LoaderStateError where the data would be other data."""
        epoch, position = read_state(state, self.kind, self._identity)
        if position > self._order.size(epoch):
            raise LoaderStateError(
                f"the loader's state has position {position} in an epoch of {self._order.size(epoch)} samples"
            )
        self._epoch, self._position, self._begun = epoch, position, False
        self._passes += 1  # a pass that is still open counts for nothing from here on

    def consumed(self) -> Consumed | None:
        """Return what was handed out since the last call, or None; lets go of the batches."""
        return self._tally.take()

    def hand_out(self, passing: _Pass, batch: Any, cut: Batch) -> None:
        """Count a batch that a pass hands to the trainer. Only the newest pass moves the position."""
        if passing.number != self._passes:
            return
        self._epoch, self._position, self._begun = passing.epoch, cut.end, True
        self._tally.add(
            batch,
            epoch=passing.epoch,
            position=cut.end,
            samples=cut.samples,
            shards=cut.shards,
            count=len(cut.rows),
            substituted=cut.substituted,
        )

    def finish(self, passing: _Pass) -> None:
        """Go to the beginning of the next epoch, at the end of a pass."""
        if passing.number == self._passes:
            self._epoch, self._position, self._begun = passing.epoch + 1, 0, False
            self._passes += 1


class _Pass:
    """One pass over the rest of an epoch. ``cuts`` holds what was given to the workers and not yet handed out.

    Nothing but the trainer holds a pass: when it is let go, so are its workers, as with torch's own.
    """

    def __init__(
        self, owner: MapStyleLoader, number: int, epoch: int, batches: Iterator[Any], cuts: deque[Batch]
    ) -> None:
        self.number = number
        self.epoch = epoch
        self._owner = owner
        self._batches = batches
        self._cuts = cuts

    def __iter__(self) -> _Pass:
        return self

    def __next__(self) -> Any:
        try:
            batch = next(self._batches)
        except StopIteration:
            self._owner.finish(self)
            raise
        self._owner.hand_out(self, batch, self._cuts.popleft())
        return batch


class _Sampler:
    """The batch sampler that a rebuilt DataLoader draws from; torch asks for its iterator at least once a pass."""

    def __init__(self, owner: MapStyleLoader) -> None:
        # No circle through a DataLoader: collecting one leaves its workers to find out by themselves, 5 s for each.
        self._owner = weakref.ref(owner)
        self._planned: Iterator[Batch] = iter(())
        self._cuts: deque[Batch] = deque()
        self.batched = True

    def follow(self, planned: Iterator[Batch], cuts: deque[Batch]) -> None:
        """Let the iterators that torch asks for from now on draw these batches, noting each in ``cuts``."""
        self._planned, self._cuts = planned, cuts

    def set_epoch(self, epoch: int) -> None:
        """See :meth:`MapStyleLoader.set_epoch`."""
        owner = self._owner()
        if owner is not None:
            owner.set_epoch(epoch)

    def __len__(self) -> int:
        owner = self._owner()
        return 0 if owner is None else len(owner)

    def __iter__(self) -> Iterator[Any]:
        return self._draw(self._planned, self._cuts)

    def _draw(self, planned: Iterator[Batch], cuts: deque[Batch]) -> Iterator[Any]:
        for cut in planned:
            cuts.append(cut)
            yield cut.rows if self.batched else cut.rows[0]


def _rebuilt(
    loader: DataLoader[Any], sampler: _Sampler, batched: bool, generator: torch.Generator | None
) -> DataLoader[Any]:
    """Build the same DataLoader around our sampler."""
    sampler.batched = batched
    drawn_from: dict[str, Any] = {"batch_sampler": sampler} if batched else {"batch_size": None, "sampler": sampler}
    if loader.num_workers:
        drawn_from["prefetch_factor"] = loader.prefetch_factor
        drawn_from["multiprocessing_context"] = loader.multiprocessing_context
    if loader.pin_memory_device:
        drawn_from["pin_memory_device"] = loader.pin_memory_device
    return DataLoader(
        loader.dataset,
        num_workers=loader.num_workers,
        collate_fn=loader.collate_fn,
        pin_memory=loader.pin_memory,
        timeout=loader.timeout,
        worker_init_fn=loader.worker_init_fn,
        generator=loader.generator if generator is None else generator,
        persistent_workers=loader.persistent_workers,
        **drawn_from,
    )


def _digest(shards: Shards | None) -> int | None:
    """Return a number that tells two layouts of shards apart."""
    if shards is None:
        return None
    return crc32(repr([(shard.name, shard.first, shard.end) for shard in shards.all]).encode())
