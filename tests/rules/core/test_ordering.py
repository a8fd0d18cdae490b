"""Rows and positions as the core computes them from a start event are those of the loader that trained."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import DataLoader, TensorDataset

from trainwarden.exporter.loader import watch
from trainwarden.plan import Exclusion
from trainwarden.rules.core.ordering import Layout, Order, Orders, layout_of

SHARDS = [("c", 60, 101), ("a", 0, 37), ("b", 37, 60)]


def told(rows: int, order: str, shards: Any = None, **how: Any) -> tuple[Any, Layout]:
    """Return a real loader over ``rows`` rows, and the layout that its start event tells."""
    plain = DataLoader(TensorDataset(torch.arange(rows)), batch_size=how.pop("batch", 4))
    loader = watch(plain, order=order, shards=shards, dataset="web", **how)
    event = {
        "loader_kind": loader.kind,
        "dataset": loader.dataset_name,
        "dataset_size": loader.dataset_size,
        "loader": loader.told,  # type: ignore[attr-defined]
    }
    layout = layout_of(event, "uid")
    assert layout is not None
    return loader, layout


@settings(max_examples=60, deadline=None)
@given(
    rows=st.integers(1, 700),
    seed=st.integers(-3, 2**70),
    order=st.sampled_from(["sequential", "shuffle", "blocks"]),
    epoch=st.integers(0, 5),
    reserve=st.sampled_from([0.0, 0.01, 0.2]),
    cuts=st.lists(st.integers(0, 700), max_size=4),
)
def test_the_order_is_the_loaders_and_its_inverse_leads_back(
    rows: int, seed: int, order: str, epoch: int, reserve: float, cuts: list[int]
) -> None:
    edges = sorted({0, rows, *(cut % (rows + 1) for cut in cuts)})
    shards = [(f"s{at}", first, end) for at, (first, end) in enumerate(itertools.pairwise(edges))]
    loader, layout = told(rows, order, shards[::-1], seed=seed, reserve=reserve)
    assert layout.computed
    mine = Order(layout)
    positions = np.arange(mine.size)
    theirs = loader.rows(epoch, positions)
    assert np.array_equal(mine.rows(epoch, positions), theirs)
    assert np.array_equal(mine.positions(epoch, theirs), positions)
    reserved = np.setdiff1d(np.arange(rows), theirs)
    assert not mine.positions(epoch, reserved).size


@pytest.mark.parametrize("order", ["sequential", "shuffle", "blocks"])
def test_a_range_of_rows_is_found_at_the_positions_that_read_it(order: str) -> None:
    loader, layout = told(101, order, SHARDS, seed=3)
    mine = Order(layout)
    for first, end in ((0, 101), (5, 9), (37, 60), (30, 70), (60, 101)):
        places = mine.spread(2, first, end)
        assert places is not None
        read = np.concatenate([loader.rows(2, np.arange(a, b)) for a, b in places])
        everything = loader.rows(2, np.arange(mine.size))
        assert sorted(read) == sorted(row for row in everything if first <= row < end)


def test_rows_are_named_within_their_shards() -> None:
    _, layout = told(101, "sequential", SHARDS)
    assert Order(layout).split(30, 65) == [("c", 0, 5), ("a", 30, 37), ("b", 0, 23)]
    _, bare = told(101, "shuffle")
    assert Order(bare).split(30, 65) == [("", 30, 65)]


def test_what_the_run_leaves_out_is_told_and_another_version_of_the_data_has_another_name() -> None:
    from trainwarden.exporter.loader.skips import Excluded, Skip, Skips

    gone = Exclusion(dataset="web", shard="a", first=3, end=5)
    skips = Skips((Skip(1, [(8, 12)]),), (Excluded(gone),))
    _, layout = told(101, "shuffle", SHARDS, skips=skips)
    assert layout.skipped(1) == [(8, 12)]
    assert layout.skipped(0) == []
    assert layout.excluded == [("a", 3, 5)]
    same = told(101, "blocks", SHARDS, seed=9)[1]
    other = told(101, "blocks", [("c", 60, 101), ("a", 0, 36), ("b", 36, 60)], seed=9)[1]
    longer = told(102, "blocks", SHARDS, seed=9)[1]
    assert layout.version == same.version
    assert len({same.version, other.version, longer.version}) == 3
    assert layout.order_name != same.order_name


def test_a_loader_without_an_order_of_its_own_knows_positions_of_its_own_run_alone() -> None:
    plain = [torch.zeros(2, 4)] * 3
    loader = watch(plain, dataset="web")
    event = {"loader_kind": loader.kind, "dataset": "web", "dataset_size": loader.dataset_size, "loader": None}
    mine, theirs = layout_of(event, "uid"), layout_of(event, "other")
    assert mine is not None
    assert theirs is not None
    assert not mine.computed
    assert mine.version == theirs.version
    assert mine.order_name != theirs.order_name
    assert layout_of({"loader_kind": None}, "uid") is None


@pytest.mark.parametrize(
    "broken",
    [
        {"shards": [["a", 5, 2]]},
        {"shards": 7},
        {"seed": "x"},
        {"reserve": 3},
        {"skips": [[1]]},
        {"batch_size": None},
        {"exclude": "x"},
        {"seed": float("inf")},
    ],
)
def test_a_start_event_that_cannot_be_meant_costs_the_rows_and_nothing_else(broken: dict[str, Any]) -> None:
    loader, _ = told(101, "shuffle", SHARDS)
    event = {"loader_kind": "map", "dataset": "web", "dataset_size": 101, "loader": {**loader.told, **broken}}
    layout = layout_of(event, "uid")
    assert layout is not None
    assert not layout.computed


def test_orders_are_kept_computed_and_few() -> None:
    layout = told(101, "shuffle", seed=1)[1]
    orders = Orders()
    first = orders.of(layout)
    assert orders.of(layout) is first
    for seed in range(2, 20):
        orders.of(told(101, "shuffle", seed=seed)[1])
    assert orders.of(layout) is not first
