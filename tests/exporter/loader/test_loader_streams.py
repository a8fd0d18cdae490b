from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, IterableDataset

from trainwarden.exporter.loader import Excluded, LoaderStateError, Skip, Skips, WatchedLoader, watch
from trainwarden.exporter.loader.ahead import DrawnAhead
from trainwarden.exporter.loader.stateful import StatefulLoader
from trainwarden.exporter.loader.streams import samples_in
from trainwarden.plan import Exclusion


class Resumable:
    """Batches of 4 with a state, as torchdata's StatefulDataLoader has one."""

    num_workers = 0

    def __init__(self, length: int = 6, workers: int = 0) -> None:
        self.length = length
        self.num_workers = workers
        self.at = 0
        self.loaded = False

    def __iter__(self) -> Iterator[dict[str, torch.Tensor]]:
        if not self.loaded:
            self.at = 0
        self.loaded = False
        while self.at < self.length:
            self.at += 1
            yield {"x": torch.full((4, 2), self.at - 1)}

    def __len__(self) -> int:
        return self.length

    def state_dict(self) -> dict[str, Any]:
        return {"at": self.at}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.at, self.loaded = state["at"], True


class Stream(IterableDataset[int]):
    def __iter__(self) -> Iterator[int]:
        return iter(range(20))


def numbers(watched: Any) -> list[int]:
    return [int(batch["x"][0, 0]) for batch in watched]


def test_a_loader_with_a_state_resumes_exactly() -> None:
    watched = watch(Resumable())
    assert isinstance(watched, WatchedLoader)
    assert (watched.kind, watched.replayable, watched.can_skip) == ("state_dict", True, {"shift"})
    passing = iter(watched)
    next(passing), next(passing)
    state = watched.state_dict()
    assert (state["epoch"], state["position"]) == (0, 8)
    resumed = watch(Resumable())
    resumed.load_state_dict(state)
    assert numbers(resumed) == [2, 3, 4, 5]
    told = resumed.consumed()
    assert told is not None
    assert (told.samples, told.count, told.position) == ([(8, 24)], 16, 24)
    assert numbers(resumed) == [0, 1, 2, 3, 4, 5]
    assert resumed.epoch == 2


def test_another_number_of_workers_or_ranks_is_refused() -> None:
    state = watch(Resumable(workers=2)).state_dict()
    with pytest.raises(LoaderStateError, match="num_workers was 2 and is 4"):
        watch(Resumable(workers=4)).load_state_dict(state)
    with pytest.raises(LoaderStateError, match="world was 1 and is 8"):
        watch(Resumable(workers=2), rank=0, world=8).load_state_dict(state)


def test_a_state_saved_before_the_loader_was_watched_is_loaded_and_said() -> None:
    watched = watch(Resumable())
    watched.load_state_dict({"at": 4})
    assert numbers(watched) == [4, 5]
    assert "saved unwatched" in watched.notices[0]


@pytest.mark.parametrize("mode", ["shift", "substitute"])
def test_batches_that_touch_a_skip_are_dropped_whole_and_the_rest_keeps_its_number(mode: Any) -> None:
    watched = watch(Resumable(), skips=Skips((Skip(0, [(9, 13)], mode),)))
    assert numbers(watched) == [0, 1, 4, 5]
    told = watched.consumed()
    assert told is not None
    assert told.samples == [(0, 8), (16, 24)]
    assert ("skip_mode" in watched.refused) == (mode == "substitute")
    assert numbers(watched) == [0, 1, 2, 3, 4, 5]


def test_a_given_order_or_exclusion_is_said_to_have_no_effect() -> None:
    excluded = Excluded(Exclusion(dataset="d", shard="a", first=0, end=1))
    watched = watch(Resumable(), order="shuffle", skips=Skips((), (excluded,)))
    assert "keeps its own order" in watched.notices[0]
    assert set(watched.refused) == {"exclude"}


def test_ranks_take_turns_in_the_numbering() -> None:
    watched = watch(Resumable(2), rank=1, world=3)
    passing = iter(watched)
    next(passing)
    first = watched.consumed()
    next(passing)
    second = watched.consumed()
    assert first is not None
    assert second is not None
    assert (first.samples, first.position) == ([(4, 8)], 12)
    assert (second.samples, second.position) == ([(16, 20)], 24)


@pytest.mark.parametrize(
    "given",
    [
        DataLoader(Stream(), batch_size=5),
        [torch.zeros(5) for _ in range(4)],
    ],
)
def test_a_plain_iterable_has_positions_and_nothing_else(given: Any) -> None:
    watched = watch(given, order="shuffle")
    assert (watched.kind, watched.replayable, watched.can_skip) == ("iterable", False, frozenset())
    assert "order given is not used" in watched.notices[0]
    assert len(list(watched)) == 4
    told = watched.consumed()
    assert told is not None
    assert (told.epoch, told.position, told.samples, told.shards) == (0, 20, [(0, 20)], [])
    assert len(list(watched)) == 4
    assert watched.epoch == 2


def test_an_iterator_goes_on_in_its_epoch_after_a_break() -> None:
    watched = watch(torch.zeros(2) for _ in range(5))
    for _ in watched:
        break
    assert watched.state_dict()["position"] == 2
    assert len(list(watched)) == 4
    told = watched.consumed()
    assert told is not None
    assert (told.epoch, told.position) == (0, 10)
    with pytest.raises(TypeError):
        len(watched)


def test_a_plain_iterables_numbers_go_on_after_a_resume_and_its_refusals_are_named() -> None:
    watched = watch([torch.zeros(3)] * 4)
    watched.load_state_dict({"trainwarden_loader": 1, "kind": "iterable", "epoch": 2, "position": 30})
    next(iter(watched))
    told = watched.consumed()
    assert told is not None
    assert (told.epoch, told.samples) == (2, [(30, 33)])
    refusing = watch([torch.zeros(3)], skips=Skips((Skip(0, [(0, 1)]),)))
    assert set(refusing.refused) == {"skip_samples"}
    assert len(list(refusing)) == 1


@dataclass
class Pair:
    name: str
    x: torch.Tensor


def test_samples_are_counted_from_shapes_alone() -> None:
    on_no_device = torch.zeros(7, 3, device="meta")
    assert samples_in(on_no_device) == 7
    assert samples_in({"name": "a", "x": [on_no_device]}) == 7
    assert samples_in(("text", on_no_device)) == 7
    assert samples_in(Pair("a", on_no_device)) == 7
    assert samples_in(torch.zeros(())) is None
    assert samples_in("text") is None
    assert samples_in(3) is None


def test_a_stream_is_told_its_epoch_and_where_its_numbers_go_on() -> None:
    class Told(Resumable):
        told: list[int]

        def set_epoch(self, epoch: int) -> None:
            self.told = [*getattr(self, "told", []), epoch]

    inner = Told(length=3)
    loader = watch(inner)
    loader.set_epoch(2)  # type: ignore[attr-defined]
    assert inner.told == [2]
    next(iter(loader))
    found = loader.consumed()
    assert found is not None
    assert (found.epoch, found.samples, found.position) == (2, [(0, 4)], 4)
    loader.set_epoch(3)  # type: ignore[attr-defined]  # the pass was left early
    batches = iter(loader)
    loader.place(3, 40)  # type: ignore[attr-defined]
    next(batches)
    found = loader.consumed()
    assert found is not None
    assert (found.epoch, found.samples, found.position) == (3, [(40, 44)], 44)


def test_an_epoch_that_is_known_leaves_a_loaded_position_alone() -> None:
    first, second = watch(Resumable()), watch(Resumable())
    next(iter(first))
    second.load_state_dict(first.state_dict())
    second.set_epoch(0)  # type: ignore[attr-defined]
    next(iter(second))
    found = second.consumed()
    assert found is not None
    assert found.samples == [(4, 8)]


def test_what_is_drawn_ahead_counts_at_its_own_turn() -> None:
    loader = DrawnAhead(watch(Resumable(length=5)))
    batches = iter(loader)
    for _ in range(3):
        next(batches)
    loader.ahead = 1
    found = loader.consumed()
    assert found is not None
    assert (found.samples, found.position, found.count) == ([(0, 8)], 8, 8)
    assert [int(batch["x"][0, 0]) for batch in found.batches] == [0, 1]
    assert loader.consumed() is None
    list(batches)
    loader.ahead = 0
    found = loader.consumed()
    assert found is not None
    assert (found.samples, found.position, len(found.batches)) == ([(8, 20)], 20, 3)
    assert (loader.kind, len(loader)) == ("state_dict", 5)


def test_a_loader_without_a_length_is_as_true_as_it_was() -> None:
    class Bare:
        def __iter__(self) -> Iterator[int]:
            return iter(range(3))

    assert watch(Bare())
    assert not watch(Resumable(length=0))


def test_the_position_after_so_many_batches_leaves_out_those_that_are_dropped() -> None:
    skips = Skips((Skip(0, [(5, 9)], "shift"), Skip(0, [(24, 30), (40, 41)], "shift")))
    loader = StatefulLoader(Resumable(length=20), dataset=None, skips=skips)
    loader._inner.batch_size = 4  # type: ignore[attr-defined]
    for handed_out, _ in enumerate(loader, 1):
        found = loader.consumed()
        assert found is not None
        assert loader.position_after(handed_out) == found.position
    assert loader.position_after(0) == 0
    assert handed_out == 15
