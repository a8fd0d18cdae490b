"""Loaders that Accelerate really prepared, of every rank: positions hold the rows that were handed out, also after a resume."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from accelerate.data_loader import prepare_data_loader
from accelerate.state import AcceleratorState, GradientState
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import DataLoader, Dataset, IterableDataset, WeightedRandomSampler

from trainwarden.exporter.loader import Excluded, LoaderStateError, Skip, Skips, WatchedLoader, watch
from trainwarden.exporter.loader.prepared import PreparedLoader
from trainwarden.exporter.loader.rebuilt import Rebuilt
from trainwarden.plan import Exclusion

SHARDS = [("a", 0, 20), ("b", 20, 50)]


class Numbers(Dataset[int]):
    def __init__(self, size: int) -> None:
        self.size = size

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> int:
        return index


@pytest.fixture(autouse=True, scope="module")
def _accelerator() -> Iterator[None]:
    Accelerator(cpu=True)
    yield
    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()


def prepared(size: int, batch: int, *, rank: int = 0, world: int = 1, seed: int | None = 3, **others: Any) -> Any:
    own = {name: others.pop(name) for name in ("split_batches", "even_batches", "dispatch_batches") if name in others}
    return prepare_data_loader(
        DataLoader(Numbers(size), batch_size=batch, **{"shuffle": seed is not None, **others}),
        num_processes=world,
        process_index=rank,
        put_on_device="dispatch_batches" in own,
        use_seedable_sampler=True,
        data_seed=seed,
        **own,
    )


def follow(loader: Any, skips: Skips | None = None, **others: Any) -> PreparedLoader:
    watched = PreparedLoader(loader, skips=skips or Skips(), **others)
    assert isinstance(watched, WatchedLoader)
    return watched


def a_pass(loader: PreparedLoader) -> Iterator[tuple[list[int], Any]]:
    """Yield each batch with what the loader says of it."""
    for batch in loader:
        consumed = loader.consumed()
        assert consumed is not None
        (own,) = consumed.batches
        assert own is batch
        yield batch.tolist(), replace(consumed, batches=[])


@given(
    size=st.integers(1, 40),
    batch=st.integers(1, 5),
    world=st.integers(1, 3),
    seed=st.sampled_from([None, 3]),
    drop_last=st.booleans(),
    split=st.booleans(),
    stop=st.integers(0, 40),
)
def test_positions_hold_the_rows_of_every_rank_and_a_pass_goes_on_at_any_of_them(
    size: int, batch: int, world: int, seed: int | None, drop_last: bool, split: bool, stop: int
) -> None:
    if size < batch * world or (split and size < batch):
        return  # Accelerate repeats rows of so small a data set in an order of its own
    for rank in range(world):
        made = [
            prepared(
                size,
                batch * world if split and world > 1 else batch,
                rank=rank,
                world=world,
                seed=seed,
                drop_last=drop_last,
                split_batches=split and world > 1,
            )
            for _ in range(3)
        ]
        loader = follow(made[0])
        alone = [[batch.tolist() for batch in made[1]] for _ in range(2)]
        seen: list[tuple[list[int], Any]] = []
        states = []
        for epoch in range(2):
            found = []
            for rows, consumed in a_pass(loader):
                found.append(rows)
                seen.append((rows, consumed))
                states.append(loader.state_dict())
                assert consumed.epoch == epoch
                positions = [at for first, end in consumed.samples for at in range(first, end)]
                assert sorted(rows) == sorted(loader.rows(epoch, positions).tolist())
                assert (consumed.count, consumed.substituted) == (len(rows), 0)
            assert found == alone[epoch]
            assert len(loader) == len(found)
        if states:
            at = stop % len(states)
            again = follow(made[2])
            again.load_state_dict(json.loads(json.dumps(states[at])))
            rest = [rows for _ in range(again.epoch, 2) for rows in a_pass(again)]
            assert [rows for rows, _ in rest] == [rows for rows, _ in seen[at + 1 :]]
            assert [consumed for _, consumed in rest] == [consumed for _, consumed in seen[at + 1 :]]


def test_batches_that_workers_fetch_ahead_have_no_position_yet() -> None:
    loader = follow(prepared(40, 4, num_workers=2))
    passing = iter(loader)
    rows = [next(passing).tolist() for _ in range(2)]
    consumed = loader.consumed()
    assert consumed is not None
    assert (consumed.samples, consumed.position) == ([(0, 8)], 8)
    assert rows == [loader.rows(0, range(4)).tolist(), loader.rows(0, range(4, 8)).tolist()]
    again = follow(prepared(40, 4, num_workers=2))
    again.load_state_dict(loader.state_dict())
    assert next(iter(again)).tolist() == loader.rows(0, range(8, 12)).tolist()


SKIPS = Skips(
    (Skip(0, [(8, 13)]), Skip(1, [(0, 2)], "shift")),
    (Excluded(Exclusion(dataset="web", shard="a", first=3, end=6)),),
)


def test_what_was_replaced_is_counted_over_the_parts_that_hold_it_and_no_other_is_kept(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("trainwarden.exporter.loader.prepared._CHUNK", 7)
    gone = [(3, 9), (60, 61), (62, 65), (139, 170)]
    loader = follow(prepared(400, 4, seed=None), Skips((Skip(0, gone),)), reserve=0.3)
    assert [consumed.substituted for _, consumed in a_pass(loader)] == [
        sum(first <= position < end for position in range(at, at + 4) for first, end in gone) for at in range(0, 400, 4)
    ]
    sampler = loader._skipping
    assert sampler is not None
    assert len(sampler.replaced[0]) == 10  # of 58 that were drawn
    assert sampler.count(0, [(0, 5), (4, 64), (150, 400)]) == 6 + 3 + 20
    assert sampler.count(1, [(0, 400)]) == 0


@pytest.mark.parametrize("world", [1, 2])
@pytest.mark.parametrize("seed", [None, 3])
def test_what_is_skipped_or_excluded_is_replaced_and_everything_else_stays(world: int, seed: int | None) -> None:
    for rank in range(world):
        plain = follow(prepared(50, 4, rank=rank, world=world, seed=seed), shards=SHARDS, dataset="web", reserve=0.3)
        loader = follow(
            prepared(50, 4, rank=rank, world=world, seed=seed), SKIPS, shards=SHARDS, dataset="web", reserve=0.3
        )
        assert (loader.can_skip, loader.refused) == ({"substitute", "exclude"}, {})
        assert any("keeps its length" in notice for notice in loader.notices)
        skipped = {*loader.rows(0, range(8, 13)).tolist(), *loader.rows(1, range(2)).tolist()}
        rebuilt = Rebuilt(
            json.loads(json.dumps({"loader": loader.told, "loader_kind": "map", "dataset": "web", "dataset_size": 50}))
        )
        for epoch in range(3):
            for (before, _), (after, consumed) in zip(a_pass(plain), a_pass(loader), strict=True):
                told = rebuilt.rows(epoch, consumed.samples)
                assert sorted(row.row for row in told) == sorted(after)
                meant = sorted(row.row if row.instead_of is None else row.instead_of for row in told)
                assert meant == sorted(before)
                replaced = [row for row in told if row.instead_of is not None]
                assert consumed.substituted == len(replaced)
                for row in told:
                    gone = 3 <= (row.instead_of if row.instead_of is not None else row.row) < 6
                    gone = gone or (epoch, row.position) in {*((0, at) for at in range(8, 13)), (1, 0), (1, 1)}
                    assert gone == (row.instead_of is not None)
                assert not {row.row for row in replaced} & {3, 4, 5, *skipped}
                assert {span.name for span in consumed.shards} <= {"a", "b"}


def test_without_rows_to_stand_in_a_skip_is_refused_with_the_reason() -> None:
    loader = follow(prepared(50, 4), SKIPS, reserve=0.0)
    assert loader.can_skip == set()
    assert "reserve=0" in loader.refused["skip_samples"]
    assert next(iter(loader)).tolist() == loader.rows(0, range(4)).tolist()


class Stream(IterableDataset[int]):
    def __iter__(self) -> Iterator[int]:
        return iter(range(10))


@pytest.mark.parametrize(
    ("loader", "why"),
    [
        (lambda: [torch.zeros(4)], "list is no DataLoader"),
        (lambda: prepare_data_loader(DataLoader(Stream(), batch_size=4), put_on_device=False), "iterable"),
        (lambda: prepared(50, 4, seed=None, sampler=WeightedRandomSampler([1.0] * 50, 50)), "WeightedRandomSampler"),
        (lambda: prepared(50, 4, world=2, dispatch_batches=True), "dispatch_batches"),
        (lambda: DataLoader(Numbers(50), batch_size=4, shuffle=True), "no seed of its own"),
        (lambda: prepared(50, 4, num_workers=1, in_order=False), "in_order=False"),
    ],
    ids=["list", "stream", "weighted", "dispatched", "global", "unordered"],
)
def test_a_loader_whose_order_nobody_can_repeat_says_why_and_counts_all_the_same(loader: Any, why: str) -> None:
    watched = follow(loader(), SKIPS)
    assert (watched.replayable, watched.can_skip, watched.told) == (False, set(), None)
    assert any(why in notice for notice in watched.notices)
    assert set(watched.refused) == {"skip_samples", "exclude"}
    if why != "dispatch_batches":  # which hands out over ranks that are not there
        next(iter(watched))
        consumed = watched.consumed()
        assert consumed is not None
        assert consumed.samples == [(0, 4)]
    with pytest.raises(LookupError, match="nobody can say"):
        watched.rows(0, [0])


def test_a_state_of_other_data_is_refused_and_a_seed_is_restored() -> None:
    state = follow(prepared(50, 4)).state_dict()
    with pytest.raises(LoaderStateError, match="dataset_size"):
        follow(prepared(40, 4)).load_state_dict(state)
    with pytest.raises(LoaderStateError, match="shuffled"):
        follow(prepared(50, 4, seed=None)).load_state_dict(state)
    other = follow(prepared(50, 4, seed=8))
    other.load_state_dict(state)
    assert next(iter(other)).tolist() == follow(prepared(50, 4)).rows(0, range(4)).tolist()


def test_a_second_exporter_around_the_same_loader_finds_the_sampler_that_was_there() -> None:
    loader = prepared(50, 4)
    sampler = loader.batch_sampler.sampler
    follow(loader, SKIPS, reserve=0.3)
    assert loader.batch_sampler.sampler is not sampler
    assert follow(loader).replayable
    assert loader.batch_sampler.sampler is sampler


def test_set_epoch_chooses_the_pass() -> None:
    loader = follow(prepared(50, 4))
    next(iter(loader))
    loader.set_epoch(4)
    assert next(iter(loader)).tolist() == loader.rows(4, range(4)).tolist()
    assert loader.epoch == 4


def test_an_epoch_that_accelerate_forgets_behind_a_resume_is_told_and_skips_hold_in_it_all_the_same() -> None:
    forgetful = prepared(50, 4)
    loader = follow(forgetful)
    loader.begin(1, 2)
    forgetful.set_epoch(0)
    assert "read in the order of epoch 0" in str(loader.misread)
    forgetful.set_epoch(1)
    assert loader.misread is None
    other = prepared(50, 4)
    skipping = follow(other, SKIPS, reserve=0.3)
    skipping.begin(1, 0)
    other.set_epoch(0)
    first = next(iter(other)).tolist()
    assert first[2:] == skipping.rows(1, range(2, 4)).tolist()
    assert first[:2] != skipping.rows(1, range(2)).tolist()


def test_whoever_wraps_a_prepared_loader_follows_it() -> None:
    loader = watch(prepared(50, 4), order="sequential")
    assert isinstance(loader, PreparedLoader)
    assert loader.replayable
    assert any("keeps its order" in notice for notice in loader.notices)
    with pytest.raises(TypeError, match="watched already"):
        watch(loader)
    shuffled = watch(
        prepare_data_loader(DataLoader(Numbers(50), batch_size=4, shuffle=True), put_on_device=False), seed=5
    )
    assert (shuffled.replayable, shuffled.state_dict()["seed"]) == (True, 5)
