"""fingerprint against counting in plain Python, on random batches and on the kinds of batches that trainers have."""

from __future__ import annotations

from itertools import groupby
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from tests.exporter.runs import steps, watch
from trainwarden.exporter.probes.fingerprint import (
    MODULUS,
    SPREAD,
    distinct,
    find_tokens,
    hash_of,
    longest_repeat,
    out_of_range,
)


def repeat_by_hand(rows: list[list[int]], masks: list[list[int]] | None = None) -> int:
    longest = 0
    for number, row in enumerate(rows):
        mask = masks[number] if masks else [1] * len(row)
        for key, run in groupby(zip(row, mask, strict=True)):
            longest = max(longest, len(list(run)) if key[1] else 0)
    return longest


@given(st.data(), st.integers(1, 4), st.integers(1, 12))
def test_longest_repeat_and_distinct_equal_counting_by_hand(data: st.DataObject, height: int, width: int) -> None:
    row = st.lists(st.integers(-1, 3), min_size=width, max_size=width)
    rows = data.draw(st.lists(row, min_size=height, max_size=height))
    bits = st.lists(st.integers(0, 1), min_size=width, max_size=width)
    masks = data.draw(st.none() | st.lists(bits, min_size=height, max_size=height))
    ids = torch.tensor(rows)
    mask = None if masks is None else torch.tensor(masks)
    assert int(longest_repeat(ids, mask)) == repeat_by_hand(rows, masks)
    assert int(distinct(ids)) == len({token for row in rows for token in row})


@given(st.data(), st.integers(1, 3), st.integers(1, 9))
def test_ids_beyond_the_vocabulary_and_the_hash_equal_counting_by_hand(
    data: st.DataObject, height: int, width: int
) -> None:
    row = st.lists(st.integers(-100, 2**31 - 1) | st.integers(0, 9), min_size=width, max_size=width)
    rows = data.draw(st.lists(row, min_size=height, max_size=height))
    bits = st.lists(st.lists(st.integers(0, 1), min_size=width, max_size=width), min_size=height, max_size=height)
    masks = data.draw(st.none() | bits)
    real = [[1] * width] * height if masks is None else masks
    beyond = sum(
        bool(bit) and not 0 <= token < 8
        for ids, mask in zip(rows, real, strict=True)
        for token, bit in zip(ids, mask, strict=True)
    )
    mask = None if masks is None else torch.tensor(masks)
    assert int(out_of_range(torch.tensor(rows), mask, 8)) == beyond
    flat = [token for ids in rows for token in ids]
    expected = sum((token + 1) * ((2 * place + 1) * SPREAD % MODULUS) % MODULUS for place, token in enumerate(flat))
    assert int(hash_of(torch.tensor(flat))) == expected % MODULUS


def test_the_hash_knows_the_order_and_survives_a_large_batch() -> None:
    ids = torch.randint(0, 50_000, (1 << 20,), generator=torch.Generator().manual_seed(0))
    assert 0 <= int(hash_of(ids)) < MODULUS
    assert int(hash_of(ids)) != int(hash_of(ids.flip(0)))
    assert int(hash_of(ids)) == int(hash_of(ids.clone().to(torch.int32)))


IDS = torch.tensor([[1, 1, 1, 2], [3, 4, 5, 6]])
LABELS = torch.tensor([[-100, 1, 1, 2], [-100, -100, 5, 6]])


@pytest.mark.parametrize(
    ("batch", "supervised"),
    [
        ({"input_ids": IDS, "labels": LABELS}, 5),
        ({"tokens": IDS}, 8),
        ((IDS, LABELS), 5),
        ([IDS, LABELS], 5),
        (({"input_ids": IDS}, LABELS), 5),
        (IDS, 8),
        ({"input_ids": IDS, "attention_mask": torch.tensor([[1, 1, 0, 0], [1, 1, 1, 1]])}, 6),
    ],
)
def test_the_fingerprint_of_each_kind_of_batch(tmp_path: Path, batch: Any, supervised: int) -> None:
    model = nn.Embedding(6, 2)
    exporter = watch(model, torch.optim.SGD(model.parameters(), lr=0.1), tmp_path)
    found = find_tokens(batch)
    assert found is not None
    exporter.batch(*found)
    exporter.step(1.0)
    (record,) = steps(exporter, tmp_path)
    assert record.value("batch_supervised_tokens") == supervised
    assert record.value("batch_unique_token_ratio") == 1.0  # six of a vocabulary of six
    assert record.value("batch_longest_repeat_tokens") == (2.0 if found[2] is not None else 3.0)
    assert record.value("tokens") == 8.0
    assert record.value("batch_ids_out_of_range") == 1.0  # id 6 of a vocabulary of six
    assert record.value("batch_hash") == float(hash_of(IDS.reshape(-1)))


@pytest.mark.parametrize(
    "batch", [torch.rand(3, 4), {"pixels": torch.rand(2, 2)}, [], "text", None, torch.tensor([1, 2])]
)
def test_what_is_no_batch_of_tokens_has_no_fingerprint(batch: Any) -> None:
    assert find_tokens(batch) is None


def test_micro_batches_of_one_step_are_one_fingerprint(tmp_path: Path) -> None:
    model = nn.Embedding(50, 2)
    exporter = watch(model, torch.optim.SGD(model.parameters(), lr=0.1), tmp_path)
    exporter.batch(torch.tensor([[1, 2, 3, 4]]))
    exporter.batch(torch.tensor([[4, 4, 5, 6]]))
    exporter.step(1.0)
    exporter.batch(torch.tensor([[7, 7, 7, 7]]))
    exporter.step(1.0)
    first, second = steps(exporter, tmp_path)
    assert first.value("batch_unique_token_ratio") == pytest.approx(6 / 8)
    assert first.value("batch_longest_repeat_tokens") == 2.0
    assert second.value("batch_unique_token_ratio") == pytest.approx(1 / 4)
    assert second.value("batch_longest_repeat_tokens") == 4.0
    assert second.value("tokens") == 12.0


def test_token_ids_out_of_range_harm_nothing(tmp_path: Path) -> None:
    model = nn.Embedding(4, 2)
    exporter = watch(model, torch.optim.SGD(model.parameters(), lr=0.1), tmp_path)
    exporter.batch(torch.tensor([[10**12, -5, 3]]))
    exporter.step(1.0)
    (record,) = steps(exporter, tmp_path)
    assert record.value("batch_unique_token_ratio") == 1.0
