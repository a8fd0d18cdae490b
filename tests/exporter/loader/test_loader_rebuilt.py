"""The rows of every step, from a start event's words alone, are those that the loader really handed out."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset, DistributedSampler

from tests.exporter.runs import events, watch
from trainwarden.exporter.loader import Excluded, Skip, Skips
from trainwarden.exporter.loader import watch as watch_loader
from trainwarden.exporter.loader.rebuilt import MOST_SHARDS, RebuildError, Rebuilt
from trainwarden.plan import Exclusion

SHARDS = [("a", 0, 40), ("b", 40, 100), ("c", 100, 130)]
SKIPS = Skips(
    (Skip(0, [(16, 24)]), Skip(0, [(40, 44)], "shift"), Skip(1, [(0, 4)])),
    (
        Excluded(Exclusion(dataset="web", shard="b", first=5, end=9)),
        Excluded(Exclusion(dataset="web", shard="c", first=2, end=4), "shift"),
    ),
)


class Numbers(Dataset[int]):
    def __len__(self) -> int:
        return 130

    def __getitem__(self, index: int) -> int:
        return index


def backwards(seed: int, epoch: int) -> Any:
    return np.random.default_rng((seed, epoch)).permutation(130)[::-1]


def start_of(loader: Any) -> dict[str, Any]:
    fields = {
        "loader": loader.told,
        "loader_kind": loader.kind,
        "dataset": loader.dataset_name,
        "dataset_size": loader.dataset_size,
    }
    told: dict[str, Any] = json.loads(json.dumps(fields))
    return told


@pytest.mark.parametrize("order", ["sequential", "shuffle", "blocks", backwards])
@pytest.mark.parametrize("skips", [Skips(), SKIPS], ids=["all", "skipping"])
@pytest.mark.parametrize("world", [1, 2])
def test_rows_are_those_that_were_handed_out(order: Any, skips: Skips, world: int) -> None:
    loaders = [
        watch_loader(
            DataLoader(
                Numbers(), batch_size=4, sampler=DistributedSampler(Numbers(), world, rank) if world > 1 else None
            ),
            seed=7,
            order=order,
            shards=SHARDS,
            reserve=0.1,
            dataset="web",
            skips=skips,
        )
        for rank in range(world)
    ]
    rebuilt = Rebuilt(start_of(loaders[-1]), order=order if callable(order) else None)
    substituted = 0
    for epoch in range(2):
        for loader in loaders:
            for batch in loader:
                consumed = loader.consumed()
                assert consumed is not None
                if consumed.count != sum(end - first for first, end in consumed.samples):
                    continue  # an epoch's end is filled up from its beginning
                rows = rebuilt.rows(epoch, consumed.samples)
                assert sorted(one.row for one in rows) == sorted(batch.tolist())
                assert [one.position for one in rows] == [
                    at for first, end in consumed.samples for at in range(first, end)
                ]
                assert sum(one.instead_of is not None for one in rows) == consumed.substituted
                substituted += consumed.substituted
                for one in rows:
                    (name, first, _) = next(shard for shard in SHARDS if shard[1] <= one.row < shard[2])
                    assert (one.shard, one.row_in_shard) == (name, one.row - first)
                    assert one.instead_of != one.row
    assert bool(substituted) == bool(skips)


def test_the_start_event_of_a_run_is_enough(tmp_path: Path) -> None:
    model = nn.Linear(1, 1)
    exporter = watch(model, torch.optim.SGD(model.parameters(), lr=0.1), tmp_path)
    loader = exporter.wrap(DataLoader(Numbers(), batch_size=8, shuffle=True), seed=3, shards=SHARDS, dataset="web")
    batches = []
    for batch in loader:
        batches.append(sorted(batch.tolist()))
        exporter.step(1.0)
    exporter.close()
    (start,) = events(tmp_path, "start")
    rebuilt = Rebuilt(start.fields)
    assert [sorted(one.row for one in rebuilt.rows(0, [(8 * k, 8 * k + 8)])) for k in range(10)] == batches[:10]


def test_what_cannot_be_rebuilt_says_why() -> None:
    loader = watch_loader(DataLoader(Numbers(), batch_size=4), order=backwards, shards=SHARDS)
    start = start_of(loader)
    with pytest.raises(RebuildError, match=r"was a function, .*backwards: name it with --order"):
        Rebuilt(start)
    with pytest.raises(RebuildError, match="cannot be rebuilt from the start event: order: the function returned"):
        Rebuilt(start, order=lambda seed, epoch: [1.5])
    with pytest.raises(RebuildError, match="of kind 'iterable'"):
        Rebuilt({"loader_kind": "iterable"})
    with pytest.raises(RebuildError, match="no loader was wrapped"):
        Rebuilt({})
    with pytest.raises(RebuildError, match="does not say in which order"):
        Rebuilt({"loader_kind": "map", "dataset_size": 4})
    with pytest.raises(RebuildError, match="cannot be rebuilt from the start event: 'seed'"):
        Rebuilt(
            {
                "loader_kind": "map",
                "dataset_size": 4,
                "loader": {"order": "shuffle", "shards": None, "shard_count": 0, "batch_size": 1, "world": 1},
            }
        )
    rebuilt = Rebuilt(start, order=backwards)
    with pytest.raises(RebuildError, match="epoch 0 has no such positions"):
        rebuilt.rows(0, [(0, 4), (10**6, 10**6 + 1)])


def test_a_layout_too_long_to_be_told_comes_from_the_data_set() -> None:
    class Many(Numbers):
        def __len__(self) -> int:
            return 2 * MOST_SHARDS

    shards = [(f"s{number}", number, number + 1) for number in range(2 * MOST_SHARDS)]
    loader = watch_loader(DataLoader(Many(), batch_size=4), order="blocks", shards=shards)
    start = start_of(loader)
    assert start["loader"]["shards"] is None
    with pytest.raises(RebuildError, match="2000 shards are too many to be in the start event"):
        Rebuilt(start)
    with pytest.raises(RebuildError, match="has 1 shards now and had 2000"):
        Rebuilt(start, shards=shards[:1])
    batch = next(iter(loader))
    assert [one.row for one in Rebuilt(start, shards=shards).rows(0, [(0, 4)])] == batch.tolist()
