"""What a start event says about a rebuilt loader, and from that alone which rows lay at which positions.

So that a journal and the data suffice, long after the run, to say what a step ate.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, cast

import msgspec
import numpy as np

from trainwarden.plan import Exclusion, SkipMode
from trainwarden.record import Ranges

from .batches import Batches, Share
from .drawn import Drawn
from .order import ORDERS, OrderFunction, make_order
from .permutation import Indices
from .shards import Shards
from .skips import Excluded, Refusals, Skip, Skips, excluded_rows

#: A layout of more shards than this is not told: whoever wants the rows names the data set, which has it.
MOST_SHARDS = 1000
#: The order of a library's own sampler, whose seed the event tells; see :mod:`exporter.loader.drawn`.
DRAWN = "drawn"


class RebuildError(ValueError):
    """The rows cannot be told. The message says what is missing and what to do."""


def told_of(
    order: str | OrderFunction, *, seed: int, reserve: float, share: Share, shards: Shards | None, skips: Skips
) -> dict[str, Any]:
    """Return what a start event says of a loader: everything that its rows are a function of, but the data set's size and name."""
    function = None
    if callable(order):
        function = ":".join(str(getattr(order, name, "?")) for name in ("__module__", "__qualname__"))
    layout = None if shards is None else [[shard.name, shard.first, shard.end] for shard in shards.all[:MOST_SHARDS]]
    return {
        "seed": seed,
        "order": order if isinstance(order, str) else "callable",
        "function": function,
        "reserve": reserve,
        "batch_size": share.batch_size,
        "world": share.world,
        "shards": layout if shards is None or len(shards) <= MOST_SHARDS else None,
        "shard_count": 0 if shards is None else len(shards),
        "skips": [[skip.epoch, [list(span) for span in skip.ranges], skip.mode] for skip in skips.skips],
        "exclude": [[msgspec.to_builtins(entry.what), entry.mode] for entry in skips.exclude],
    }


@dataclass(frozen=True, slots=True)
class Row:
    """What lay at a position: the row that was read, and where it lies. ``instead_of`` is the skipped row that it stood in for."""

    position: int
    row: int
    shard: str | None
    row_in_shard: int | None
    instead_of: int | None


class Rebuilt:
    """The rows of a loader of kind ``map``, from the fields of its start event.

    ``order`` replaces an order that was a function of the trainer's, ``shards`` a layout that was too long to be told.

    Raises:
        RebuildError: the event says too little, or what was given is another order or data set.
    """

    def __init__(
        self,
        start: Mapping[str, Any],
        order: Callable[[int, int], Any] | None = None,
        shards: Iterable[Any] | None = None,
    ) -> None:
        told, size, name = start.get("loader"), start.get("dataset_size"), start.get("dataset")
        if start.get("loader_kind") not in ("map", None):
            raise RebuildError(
                f"the loader is of kind {start.get('loader_kind')!r}: its order was its own, so positions are numbers of samples in the "
                "order in which they were handed out, and which rows these were only the loader itself can say"
            )
        if start.get("loader_kind") is None:
            raise RebuildError("no loader was wrapped: pass yours through exporter.wrap() for positions")
        if not isinstance(told, Mapping) or not isinstance(size, int):
            raise RebuildError(
                "the start event does not say in which order the loader read, as it does of a DataLoader that wrap() rebuilt"
            )
        try:
            self._shards, batches = _rebuild(told, size, name, order, shards)
        except RebuildError:
            raise
        except (KeyError, IndexError, TypeError, ValueError) as error:
            raise RebuildError(f"the loader cannot be rebuilt from the start event: {error}") from None
        self._batches: Batches | Drawn = batches

    def rows(self, epoch: int, positions: Ranges) -> list[Row]:
        """Return what lay at the positions of an epoch, in their order.

        Raises:
            RebuildError: the epoch has no such positions.
        """
        asked = (
            np.concatenate([np.arange(first, end) for first, end in positions]) if positions else np.zeros(0, np.int64)
        )
        try:
            rows, meant, replaced = self._batches.rows(epoch, asked.astype(np.int64))
        except (IndexError, ValueError) as error:
            raise RebuildError(f"epoch {epoch} has no such positions: {error}") from None
        within = self._of(rows)
        found = []
        for place, (position, row) in enumerate(zip(asked.tolist(), rows.tolist(), strict=True)):
            shard = None if self._shards is None or within[place] < 0 else self._shards.all[int(within[place])]
            found.append(
                Row(
                    position,
                    row,
                    None if shard is None else shard.name,
                    None if shard is None else row - shard.first,
                    int(meant[place]) if replaced is not None and replaced[place] else None,
                )
            )
        return found

    def _of(self, rows: Indices) -> Indices:
        return np.full(rows.shape, -1) if self._shards is None else self._shards.of(rows)


def _rebuild(
    told: Mapping[str, Any], size: int, name: Any, order: OrderFunction | None, given: Iterable[Any] | None
) -> tuple[Shards | None, Batches | Drawn]:
    layout = told["shards"]
    if layout is None and told["shard_count"]:
        if given is None:
            raise RebuildError(
                f"its {told['shard_count']} shards are too many to be in the start event: name the data set, which offers them"
            )
        layout = list(given)
        if len(layout) != told["shard_count"]:
            raise RebuildError(f"the data set has {len(layout)} shards now and had {told['shard_count']}")
    shards = None if layout is None else Shards(layout, size)
    seed, share = told["seed"], Share(int(told["batch_size"]), 0, int(told["world"]))
    skips = Skips(
        tuple(
            Skip(int(epoch), [(int(first), int(end)) for first, end in ranges], cast(SkipMode, mode))
            for epoch, ranges, mode in told["skips"]
        ),
        tuple(Excluded(msgspec.convert(what, Exclusion), cast(SkipMode, mode)) for what, mode in told["exclude"]),
    )
    if told["order"] == DRAWN:
        seed, step, held = None if seed is None else int(seed), share.batch_size * share.world, float(told["reserve"])
        return shards, Drawn(size, seed, step=step, reserve=held, shards=shards, dataset=name, skips=skips)
    chosen: str | OrderFunction = told["order"]
    if chosen not in ORDERS:
        if order is None:
            raise RebuildError(f"its order was a function, {told['function']}: name it with --order module:function")
        chosen = order
    made, reserve = make_order(
        chosen,
        size,
        shards=shards,
        seed=int(seed),
        share=float(told["reserve"]),
        batch=share.batch_size * share.world,
    )
    excluded = excluded_rows(skips.exclude, name, shards, Refusals(), size)
    return shards, Batches(made, reserve, shards, skips, excluded, share)
