"""One packed copy a step: what is put down comes out, in its own type's precision, and nothing ever waits."""

from __future__ import annotations

import numpy as np
import torch

from trainwarden.exporter.sheet import Sheet
from trainwarden.exporter.staging import SLOTS, Staging, _PinnedLane


def sheet_of(**tensors: torch.Tensor) -> Sheet:
    sheet = Sheet()
    for name, tensor in tensors.items():
        sheet.add(name, tensor, meta=name.upper())
    return sheet


def test_values_of_every_type_and_shape_come_out_under_their_names() -> None:
    staged = Staging(set(), 100).send(
        sheet_of(
            a=torch.tensor(1.5),
            b=torch.tensor([1, 2**53 - 1]),
            c=torch.tensor(True),
            d=torch.tensor(1 / 3, dtype=torch.float64),
            e=torch.tensor([0.5], dtype=torch.bfloat16),
        )
    )
    assert staged is not None
    assert staged.ready()
    values, complete = staged.read()
    assert complete
    assert {name: (found[0][0], list(found[0][1])) for name, found in values.items()} == {
        "a": ("A", [1.5]),
        "b": ("B", [1.0, 2.0**53 - 1]),
        "c": ("C", [1.0]),
        "d": ("D", [1 / 3]),
        "e": ("E", [0.5]),
    }


def test_what_is_written_after_sending_is_not_seen() -> None:
    value = torch.tensor([1.0, 2.0])
    staged = Staging(set(), 100).send(sheet_of(a=value))
    value.fill_(9.0)
    assert staged is not None
    assert list(staged.read()[0]["a"][0][1]) == [1.0, 2.0]


def test_a_single_value_is_copied_too() -> None:
    value = torch.tensor([1.0], dtype=torch.float64)
    staged = Staging(set(), 100).send(sheet_of(a=value))
    value.fill_(9.0)
    assert staged is not None
    assert list(staged.read()[0]["a"][0][1]) == [1.0]


def test_an_empty_sheet_is_complete() -> None:
    staged = Staging(set(), 100).send(Sheet())
    assert staged is not None
    assert staged.read() == ({}, True)


def test_tensors_without_data_give_no_values() -> None:
    staged = Staging(set(), 100).send(sheet_of(a=torch.zeros(2, device="meta"), b=torch.tensor(1.0)))
    assert staged is not None
    values, complete = staged.read()
    assert not complete
    assert list(values) == ["b"]


# The pinned lane needs CUDA to be asynchronous; its bookkeeping does not.


def test_a_slot_is_ready_only_once_its_own_word_has_arrived() -> None:
    lane = _PinnedLane(torch.device("cpu"), 4)
    transfer = lane.send(torch.tensor([1.0, 2.0], dtype=torch.float64))
    word = lane._slots[0].word_seen
    assert transfer.ready()
    word[0] = 0  # as it is before the copy behind the payload
    assert not transfer.ready()
    word[0] = 1
    assert transfer.ready()
    found = transfer.read()
    assert found is not None
    assert np.array_equal(found, [1.0, 2.0])


def test_a_slot_that_is_used_again_is_not_taken_for_the_step_before() -> None:
    lane = _PinnedLane(torch.device("cpu"), 4)
    for number in range(3 * SLOTS):
        transfer = lane.send(torch.tensor([float(number)], dtype=torch.float64))
        assert transfer.ready()
        found = transfer.read()
        assert found is not None
        assert found[0] == number


def test_without_a_free_slot_or_beyond_the_capacity_there_is_no_room_and_nobody_waits() -> None:
    lane = _PinnedLane(torch.device("cpu"), 4)
    assert not lane.has_room(5)
    waiting = [lane.send(torch.zeros(1, dtype=torch.float64)) for _ in range(SLOTS)]
    assert not lane.has_room(1)
    waiting[0].read()
    assert lane.has_room(1)
