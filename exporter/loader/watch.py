"""Wraps a loader so that it knows what it hands out, choosing the best that this kind of loader allows."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch.utils.data import DataLoader

from .map_style import MapStyleLoader, read_blueprint
from .order import OrderFunction
from .plain import PlainLoader
from .prepared import PreparedLoader, is_prepared
from .shards import Shards
from .skips import Skips
from .stateful import StatefulLoader
from .watched import WatchedLoader


def watch(
    loader: Iterable[Any],
    *,
    seed: int = 0,
    order: str | OrderFunction | None = None,
    shards: Iterable[Any] | None = None,
    reserve: float = 0.01,
    dataset: str | None = None,
    skips: Skips | None = None,
    rank: int | None = None,
    world: int | None = None,
) -> WatchedLoader:
    """Wrap any loader.

    Args:
        loader: a map-style DataLoader, a loader with ``state_dict``/``load_state_dict``, or any iterable of batches.
        seed: the order of every epoch is a function of it and the epoch.
        order: None follows the given loader's sampler; ``sequential``, ``shuffle``, ``blocks`` (shards in shuffled order, the
            rows of each in shuffled order), or a function ``(seed, epoch) -> rows``.
        shards: ``(name, first_row, end_row)`` of each shard; None asks ``loader.dataset.shards``.
        reserve: share of the rows held back to substitute for skipped ones; 0 holds none back.
        dataset: the data set's name, by which a plan excludes data.
        skips: what must not be trained on.
        rank, world: for loaders that are passed through; None asks torch.distributed.

    Raises:
        TypeError, ValueError: an argument is of no use; the message names it.
    """
    if isinstance(loader, MapStyleLoader | StatefulLoader | PlainLoader | PreparedLoader):
        raise TypeError("wrap: this loader is watched already; wrap the one that it was made from")
    if not hasattr(loader, "__iter__"):
        raise TypeError(f"wrap: {type(loader).__name__} is no loader: it cannot be iterated")
    wanted = skips or Skips()
    if is_prepared(loader):  # before it is asked for a state_dict, which it has the method for and nothing in it
        prepared = PreparedLoader(
            loader, skips=wanted, order_seed=seed, shards=shards, reserve=reserve, dataset=dataset
        )
        if order is not None:
            prepared.notices.append("loader: Accelerate prepared it and keeps its order; the one given is not used")
        return prepared
    if callable(getattr(loader, "state_dict", None)) and callable(getattr(loader, "load_state_dict", None)):
        stateful = StatefulLoader(loader, dataset=dataset, skips=wanted, rank=rank, world=world)
        if order is not None:
            stateful.notices.append("loader: a loader with a state_dict keeps its own order; the one given is not used")
        return stateful
    blueprint = read_blueprint(loader, order) if isinstance(loader, DataLoader) else "it is no torch DataLoader"
    if isinstance(blueprint, str):
        if order is not None:
            blueprint += "; the order given is not used"
        return PlainLoader(loader, why=blueprint, dataset=dataset, skips=wanted, rank=rank, world=world)
    assert isinstance(loader, DataLoader)
    layout, notice = _layout(loader.dataset, shards)
    watched = MapStyleLoader(
        loader, blueprint, seed=seed, shards=layout, reserve=reserve, dataset=dataset, skips=wanted
    )
    if notice:
        watched.notices.append(notice)
    return watched


def _layout(dataset: Any, given: Iterable[Any] | None) -> tuple[Shards | None, str | None]:
    """Return the shards of a data set. Those that it offers itself may be of another kind: then they are left alone."""
    if given is not None:
        return Shards(given, len(dataset)), None
    offered = getattr(dataset, "shards", None)
    if not isinstance(offered, list | tuple) or not offered:
        return None, None
    try:
        return Shards(offered, len(dataset)), None
    except (TypeError, ValueError) as error:
        return None, f"loader: dataset.shards is not used: {error}"
