from __future__ import annotations

import gc
from typing import Any

import pytest
import torch
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    DistributedSampler,
    RandomSampler,
    SequentialSampler,
    SubsetRandomSampler,
    TensorDataset,
)

from trainwarden.exporter.loader import Excluded, LoaderStateError, Skip, Skips, WatchedLoader, watch
from trainwarden.exporter.loader.consumed import BATCHES_KEPT
from trainwarden.plan import Exclusion

ROWS = 100


class Numbers(Dataset[int]):
    def __init__(self, shards: Any = None) -> None:
        self.shards = shards

    def __len__(self) -> int:
        return ROWS

    def __getitem__(self, row: int) -> int:
        return row


def loader(**settings: Any) -> DataLoader[int]:
    return DataLoader(Numbers(), **{"batch_size": 8, "shuffle": True} | settings)


def drain(watched: Any) -> list[list[int]]:
    return [batch.tolist() for batch in watched]


def flat(watched: Any) -> list[int]:
    return [row for batch in watched for row in batch.tolist()]


def take(watched: Any, count: int) -> list[list[int]]:
    passing = iter(watched)
    return [next(passing).tolist() for _ in range(count)]


def test_it_is_a_watched_loader_and_follows_the_given_sampler() -> None:
    watched = watch(loader(shuffle=False), reserve=0.0)
    assert isinstance(watched, WatchedLoader)
    assert (watched.kind, watched.replayable, watched.batch_size, watched.dataset_size) == ("map", True, 8, ROWS)
    assert watched.notices == []
    assert drain(watched) == [list(range(at, min(at + 8, ROWS))) for at in range(0, ROWS, 8)]
    assert drain(watch(loader(), reserve=0.0)) != drain(watch(loader(shuffle=False), reserve=0.0))


def test_epochs_differ_and_come_again_with_the_same_seed() -> None:
    watched, again, other = watch(loader(), seed=1), watch(loader(), seed=1), watch(loader(), seed=2)
    first, second = drain(watched), drain(watched)
    assert first != second
    assert [drain(again), drain(again)] == [first, second]
    assert drain(other) != first
    assert len(watched) == len(first)


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("resumed_with", [0, 2])
def test_a_resumed_pass_goes_on_after_what_the_trainer_was_handed(workers: int, resumed_with: int) -> None:
    whole = watch(loader(), seed=3)
    epochs = [drain(whole), drain(whole)]
    stopped = watch(loader(num_workers=workers), seed=3)
    head = take(stopped, 5)
    state = stopped.state_dict()
    assert state["position"] == 40  # two workers have fetched further
    resumed = watch(loader(num_workers=resumed_with), seed=3)
    resumed.load_state_dict(state)
    assert head + drain(resumed) == epochs[0]
    assert drain(resumed) == epochs[1]


@pytest.mark.parametrize("workers", [0, 2])
def test_persistent_workers_an_early_break_and_several_epochs(workers: int) -> None:
    reference = watch(loader(), seed=4)
    epochs = [drain(reference) for _ in range(4)]
    watched = watch(loader(num_workers=workers, persistent_workers=workers > 0), seed=4)
    assert drain(watched) == epochs[0]
    for number, batch in enumerate(watched):
        assert batch.tolist() == epochs[1][number]
        if number == 2:
            break
    assert watched.state_dict()["position"] == 24
    assert drain(watched) == epochs[2]
    assert (watched.epoch, watched.state_dict()["position"]) == (3, 0)
    assert drain(watched) == epochs[3]


def test_a_checkpoint_after_the_last_batch_resumes_with_nothing_left_of_the_epoch() -> None:
    watched = watch(loader(), seed=4)
    take(watched, len(watched))
    resumed = watch(loader(), seed=4)
    resumed.load_state_dict(watched.state_dict())
    assert drain(resumed) == []
    assert drain(resumed) == drain_epoch(1)


def drain_epoch(epoch: int) -> list[list[int]]:
    watched: Any = watch(loader(), seed=4)
    watched.set_epoch(epoch)
    return drain(watched)


def test_set_epoch_chooses_the_next_pass_and_keeps_a_loaded_position() -> None:
    whole = drain_epoch(2)
    resumed: Any = watch(loader(), seed=4)
    stopped: Any = watch(loader(), seed=4)
    stopped.set_epoch(2)
    take(stopped, 3)
    resumed.load_state_dict(stopped.state_dict())
    resumed.sampler.set_epoch(2)
    assert drain(resumed) == whole[3:]
    resumed.set_epoch(2)
    assert drain(resumed) == whole


def test_a_pass_that_was_replaced_hands_on_without_moving_the_position() -> None:
    watched = watch(loader(), seed=1)
    old = iter(watched)
    next(old)
    new = iter(watched)
    next(new)
    next(old)
    assert (watched.state_dict()["epoch"], watched.state_dict()["position"]) == (1, 8)


def test_what_was_consumed_is_told_once_and_the_batches_are_let_go() -> None:
    watched = watch(loader(shuffle=False), reserve=0.0)
    assert watched.consumed() is None
    passing = iter(watched)
    first, second = next(passing), next(passing)
    told = watched.consumed()
    assert told is not None
    assert (told.epoch, told.position, told.samples, told.count, told.substituted) == (0, 16, [(0, 16)], 16, 0)
    assert told.batches[0] is first
    assert told.batches[1] is second
    del told, first, second
    gc.collect()
    assert watched.consumed() is None
    for _ in range(3):
        list(watched)
    told = watched.consumed()
    assert told is not None
    assert (told.epoch, told.position) == (3, ROWS)
    assert len(told.batches) <= BATCHES_KEPT


def test_the_rest_of_the_loader_is_kept() -> None:
    started: list[int] = []
    given = loader(
        num_workers=0, collate_fn=sorted, drop_last=True, worker_init_fn=started.append, pin_memory=False, timeout=0
    )
    watched: Any = watch(given, seed=1)
    found = list(watched)
    assert all(len(batch) == 8 and batch == sorted(batch) for batch in found)
    assert watched.dataset is given.dataset
    assert watched.num_workers == 0
    assert watched.worker_init_fn is given.worker_init_fn
    forked: Any = watch(loader(num_workers=2, prefetch_factor=3, persistent_workers=True), seed=1)
    assert (forked.prefetch_factor, forked.persistent_workers) == (3, True)


def test_single_rows_without_batches_are_passed_through() -> None:
    watched = watch(DataLoader(Numbers(), batch_size=None), reserve=0.0)
    assert list(watched) == list(range(ROWS))
    told = watched.consumed()
    assert told is not None
    assert (told.count, told.samples) == (ROWS, [(0, ROWS)])


def test_the_global_generator_is_left_alone() -> None:
    torch.manual_seed(0)
    before = torch.get_rng_state()
    drain(watch(loader()))
    assert torch.equal(before, torch.get_rng_state())
    torch.manual_seed(0)
    generator = torch.Generator().manual_seed(5)
    kept: Any = watch(loader(generator=generator))
    assert kept.generator is generator


@pytest.mark.parametrize("workers", [0, 2])
def test_ranks_of_a_distributed_sampler_share_the_global_order(workers: int) -> None:
    def of(rank: int) -> Any:
        sampler = DistributedSampler(Numbers(), num_replicas=2, rank=rank, shuffle=True)
        return watch(loader(shuffle=None, sampler=sampler, num_workers=workers), seed=6)

    ranks = [of(0), of(1)]
    rows = [drain(rank) for rank in ranks]
    alone = drain(watch(loader(batch_size=16), seed=6))
    assert [one + two for one, two in zip(*rows, strict=True)][:5] == alone[:5]
    told = [rank.consumed() for rank in ranks]
    assert told[0].position == told[1].position == ROWS - 10


def test_an_explicit_order_takes_the_place_of_any_sampler() -> None:
    given = loader(shuffle=None, sampler=SubsetRandomSampler(range(10)))
    watched = watch(given, order="sequential", reserve=0.0)
    assert watched.kind == "map"
    assert "SubsetRandomSampler" in watched.notices[0]
    assert flat(watched) == list(range(ROWS))


@pytest.mark.parametrize(
    ("given", "says"),
    [
        (loader(shuffle=None, sampler=SubsetRandomSampler(range(10))), "SubsetRandomSampler"),
        (loader(shuffle=None, sampler=RandomSampler(Numbers(), replacement=True)), "with replacement"),
        (loader(shuffle=None, sampler=RandomSampler(Numbers(), num_samples=10)), "not the whole data set"),
        (loader(shuffle=None, sampler=SequentialSampler(range(10))), "covers 10 of 100 rows"),
        (
            DataLoader(
                Numbers(), batch_sampler=type("Odd", (BatchSampler,), {})(SequentialSampler(range(100)), 4, False)
            ),
            "a Odd",
        ),
        (type("Own", (DataLoader,), {})(Numbers()), "DataLoader of its own kind"),
    ],
)
def test_a_sampler_that_cannot_be_reproduced_leaves_positions_only(given: DataLoader[int], says: str) -> None:
    watched = watch(given)
    assert (watched.kind, watched.replayable, watched.can_skip) == ("iterable", False, frozenset())
    assert says in watched.notices[0]
    assert "not replayable" in watched.notices[0]


@pytest.mark.parametrize(
    "other",
    [
        {"seed": 2},
        {"order": "sequential"},
        {"reserve": 0.2},
        {"order": "blocks", "shards": [("a", 0, 50), ("b", 50, 100)]},
    ],
)
def test_a_state_of_another_order_is_refused_with_what_differs(other: dict[str, Any]) -> None:
    state = watch(loader(), seed=1).state_dict()
    watched = watch(loader(), **{"seed": 1} | other)
    name = next(iter(other))
    with pytest.raises(LoaderStateError, match=f"{name} was"):
        watched.load_state_dict(state)


def test_blocks_of_other_shards_are_another_order() -> None:
    state = watch(loader(), order="blocks", shards=[("a", 0, 60), ("b", 60, 100)]).state_dict()
    with pytest.raises(LoaderStateError, match="shards was"):
        watch(loader(), order="blocks", shards=[("a", 0, 50), ("b", 50, 100)]).load_state_dict(state)


@pytest.mark.parametrize(
    "state",
    [{}, {"trainwarden_loader": 9}, {"trainwarden_loader": 1, "kind": "iterable"}],
)
def test_a_state_of_something_else_is_refused(state: dict[str, Any]) -> None:
    with pytest.raises(LoaderStateError):
        watch(loader()).load_state_dict(state)
    good = watch(loader()).state_dict()
    with pytest.raises(LoaderStateError, match="whole numbers"):
        watch(loader()).load_state_dict(good | {"position": -8})
    with pytest.raises(LoaderStateError, match="position 1000"):
        watch(loader()).load_state_dict(good | {"position": 1000})


def test_the_state_survives_a_checkpoint_that_is_loaded_safely(tmp_path: Any) -> None:
    watched = watch(loader(), seed=2**40)
    take(watched, 2)
    torch.save({"loader": watched.state_dict()}, tmp_path / "c.pt")
    again = watch(loader(), seed=2**40)
    again.load_state_dict(torch.load(tmp_path / "c.pt", weights_only=True)["loader"])
    assert again.state_dict() == watched.state_dict()


def test_what_it_can_skip_depends_on_reserve_shards_and_name() -> None:
    shards = [("a", 0, 50), ("b", 50, 100)]
    assert watch(loader(), reserve=0.0).can_skip == {"shift"}
    assert watch(loader()).can_skip == {"shift", "substitute"}
    assert watch(loader(), shards=shards).can_skip == {"shift", "substitute"}
    assert watch(loader(), shards=shards, dataset="d").can_skip == {"shift", "substitute", "exclude"}


def test_shards_of_the_data_set_are_used_and_foreign_ones_left_alone() -> None:
    own = DataLoader(Numbers([("a", 0, 50), ("b", 50, 100)]), batch_size=8)
    assert watch(own, order="blocks", dataset="d").can_skip == {"shift", "substitute", "exclude"}
    foreign = watch(DataLoader(Numbers(["part-0.parquet"]), batch_size=8))
    assert "dataset.shards is not used" in foreign.notices[0]
    assert watch(DataLoader(Numbers(7), batch_size=8)).notices == []


def test_skips_and_exclusions_reach_the_data_and_the_tally() -> None:
    shards = [("a", 0, 50), ("b", 50, 100)]
    skips = Skips((Skip(0, [(8, 12)]),), (Excluded(Exclusion(dataset="d", shard="b", first=0, end=10)),))
    watched = watch(loader(shuffle=False, num_workers=2), shards=shards, dataset="d", skips=skips)
    plain = flat(watch(loader(shuffle=False), shards=shards))
    found = flat(watched)
    told = watched.consumed()
    assert told is not None
    changed = [position for position, (old, new) in enumerate(zip(plain, found, strict=True)) if old != new]
    excluded = [position for position, row in enumerate(plain) if 50 <= row < 60]
    assert changed == [*range(8, 12), *excluded]
    assert told.substituted == len(changed)
    assert watched.refused == {}
    second = flat(watched)
    assert second[8:12] == plain[8:12]
    assert not set(second) & set(range(50, 60))


def test_what_it_was_asked_and_cannot_do_is_refused_and_still_not_trained_on() -> None:
    skips = Skips((Skip(0, [(0, 8)]),), (Excluded(Exclusion(dataset="d", shard="b", first=0, end=10)),))
    watched = watch(loader(shuffle=False), reserve=0.0, skips=skips)
    assert set(watched.refused) == {"skip_mode", "exclude"}
    assert drain(watched)[0] == list(range(8, 16))


def test_a_skip_longer_than_the_reserve_is_said() -> None:
    watched = watch(loader(), skips=Skips((Skip(0, [(0, 60)]),)))
    assert "60 skipped positions are filled from a reserve of 8 rows" in watched.notices[0]


def test_a_loader_is_watched_once_and_must_be_one() -> None:
    with pytest.raises(TypeError, match="watched already"):
        watch(watch(loader()))
    with pytest.raises(TypeError, match="int is no loader"):
        watch(5)  # type: ignore[arg-type]


def test_rows_say_what_lies_at_positions() -> None:
    watched: Any = watch(DataLoader(TensorDataset(torch.arange(ROWS)), batch_size=10, shuffle=True), seed=1)
    first = next(iter(watched))[0]
    assert watched.rows(0, range(10)).tolist() == first.tolist()
