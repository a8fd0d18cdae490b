"""fingerprint against counting in plain Python, on random batches and on the kinds of batches that trainers have."""

from __future__ import annotations

import time
import urllib.request
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple, cast

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from tests.exporter.runs import lines, steps, watch
from trainwarden.exporter.probes.fingerprint import (
    MODULUS,
    SPREAD,
    Fingerprint,
    distinct,
    hash_of,
    longest_repeat,
    out_of_range,
    seen,
    table_places,
)
from trainwarden.exporter.probes.probe import Closing
from trainwarden.exporter.sheet import Sheet
from trainwarden.exporter.tokens import find_tokens
from trainwarden.exporter.vocabulary import TokenClasses
from trainwarden.record import Step


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
    different = {token for row in rows for token in row}
    assert int(distinct(ids)) == len(different)
    assert int(seen(table_places(ids, 6), 6).sum()) == len(
        different
    )  # -1 … 3 lie in or just beside a vocabulary of four


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
MASK = torch.tensor([[1, 1, 0, 0], [1, 1, 1, 1]])


@dataclass
class Packed:
    input_ids: Any
    labels: Any = None
    names: tuple[str, ...] = ("a", "b")


class Pair(NamedTuple):
    x: Any
    y: Any


def batch_encoding(**parts: Any) -> Any:
    transformers = pytest.importorskip("transformers")
    return transformers.BatchEncoding(parts)


def first_record(folder: Path, batch: Any, vocabulary: int = 6, **arguments: Any) -> Step:
    model = nn.Embedding(vocabulary, 2)
    exporter = watch(model, torch.optim.SGD(model.parameters(), lr=0.1), folder, **arguments)
    for one in exporter.wrap([batch]):
        assert one is batch
    exporter.step(1.0)
    (record,) = steps_of(exporter, folder)
    return record


def steps_of(exporter: Any, folder: Path) -> list[Step]:
    exporter.close()
    assert [said for said in exporter.notices if "loader" not in said] == []
    return [line for line in lines(folder) if isinstance(line, Step)]


@pytest.mark.parametrize(
    ("batch", "supervised"),
    [
        ({"input_ids": IDS, "labels": LABELS}, 5),
        ({"tokens": IDS}, 8),
        ((IDS, LABELS), 5),
        ([IDS, LABELS], 5),
        ((IDS, LABELS[:, 1:]), 5),
        ((IDS, LABELS.flatten()), 5),
        ((IDS, torch.rand(2, 3)), 8),
        (({"input_ids": IDS}, LABELS), 5),
        (IDS, 8),
        (IDS.numpy(), 8),
        ({"input_ids": IDS, "attention_mask": MASK}, 6),
        (
            {
                "input_ids": IDS.to(torch.int32),
                "labels": LABELS,
                "loss_mask": torch.tensor([[0.0, 1, 0, 0], [0, 0, 1, 1]]),
            },
            3,
        ),
        ({"text": {"inner": {"input_ids": IDS, "labels": LABELS}}, "image": torch.rand(2, 3)}, 5),
        ({"input": {"tokens": IDS}, "labels": LABELS}, 5),
        ({"input_ids": IDS.numpy().astype(np.uint16), "labels": LABELS.numpy()}, 5),
        ({"input_ids": IDS.numpy().astype(">i4"), "labels": LABELS.numpy()}, 5),
        ({"input_ids": IDS.tolist(), "labels": LABELS.tolist()}, 5),
        ({"input_ids": list(IDS), "labels": list(LABELS)}, 5),
        ([{"input_ids": row.tolist(), "labels": labels} for row, labels in zip(IDS, LABELS, strict=True)], 5),
        (Packed(IDS, LABELS), 5),
        (Pair(IDS, LABELS), 5),
        (SimpleNamespace(tokens=IDS, targets=LABELS), 5),
    ],
    ids=lambda value: type(value).__name__,
)
def test_the_fingerprint_of_each_kind_of_batch(tmp_path: Path, batch: Any, supervised: int) -> None:
    record = first_record(tmp_path, batch)
    masked = isinstance(batch, dict) and "attention_mask" in batch
    assert record.value("batch_supervised_tokens") == supervised
    assert record.value("batch_unique_token_ratio") == 1.0  # six of a vocabulary of six
    assert record.value("batch_longest_repeat_tokens") == (2.0 if masked else 3.0)
    assert record.value("tokens") == 8.0
    assert record.value("batch_ids_out_of_range") == 1.0  # id 6 of a vocabulary of six
    assert record.value("batch_hash") == float(hash_of(IDS.reshape(-1)))


@pytest.mark.parametrize(
    "batch", [(IDS, LABELS), [IDS, LABELS], {"tokens": IDS, "targets": LABELS}, Pair(IDS, LABELS), Packed(IDS, LABELS)]
)
def test_a_whole_batch_can_be_handed_in_as_it_is(tmp_path: Path, batch: Any) -> None:
    model = nn.Embedding(6, 2)
    exporter = watch(model, torch.optim.SGD(model.parameters(), lr=0.1), tmp_path)
    exporter.batch(batch, source="web")
    exporter.step(1.0)
    (record,) = steps(exporter, tmp_path)
    assert record.value("batch_supervised_tokens") == 5.0
    assert record.value("batch_hash") == float(hash_of(IDS.reshape(-1)))
    assert record.signals["source_share"] == {"web": 1.0}


def test_a_batch_encoding_is_read_as_the_dict_that_it_is(tmp_path: Path) -> None:
    record = first_record(tmp_path, batch_encoding(input_ids=IDS, attention_mask=MASK, labels=LABELS))
    assert record.value("batch_supervised_tokens") == 5.0
    assert record.value("batch_longest_repeat_tokens") == 2.0


FLAT = torch.tensor([7, 7, 7, 7, 7, 7, 1, 2])


@pytest.mark.parametrize(
    ("said", "longest"),
    [
        ({}, 6),
        ({"position_ids": torch.tensor([0, 1, 2, 3, 0, 1, 2, 3])}, 4),
        ({"cu_seqlens": torch.tensor([0, 2, 5, 8], dtype=torch.int32)}, 3),
        ({"cu_seq_lens_q": [0, 2, 5, 8]}, 3),
        ({"cu_seqlens": torch.tensor([-5, 3, 9**12])}, 3),
        ({"seq_idx": torch.tensor([0, 0, 1, 1, 2, 2, 2, 2])}, 2),
    ],
    ids=["nothing", "positions", "offsets", "offsets-in-a-list", "offsets-out-of-range", "documents"],
)
@pytest.mark.parametrize("shape", [(8,), (1, 8)])
def test_a_repeat_ends_with_its_document_in_packed_sequences(
    tmp_path: Path, said: dict[str, Any], longest: int, shape: tuple[int, ...]
) -> None:
    given = {
        name: value.reshape(shape) if isinstance(value, torch.Tensor) and value.numel() == 8 else value
        for name, value in said.items()
    }
    record = first_record(tmp_path, {"input_ids": FLAT.reshape(shape), **given}, vocabulary=9)
    assert record.value("batch_longest_repeat_tokens") == longest


def test_rows_of_several_lengths_are_one_document_each(tmp_path: Path) -> None:
    record = first_record(tmp_path, {"input_ids": [[7, 7, 7], [7, 7], [1]], "labels": [[7, 7, -100], [7, 7], [1]]}, 9)
    assert record.value("batch_longest_repeat_tokens") == 3.0
    assert record.value("batch_supervised_tokens") == 5.0
    assert record.value("tokens") == 6.0


@pytest.mark.parametrize(
    "batch",
    [
        torch.rand(3, 4),
        {"pixels": torch.rand(2, 2)},
        [],
        "text",
        None,
        torch.tensor([1, 2]),
        {"x": torch.tensor([1, 2])},
        {"input_ids": ["a", "b"], "inputs": [[1, "b"]]},
        {"input_ids": torch.zeros(0, 4, dtype=torch.int64)},
        [torch.rand(2), torch.tensor([1, 0])],
        Packed,
    ],
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


def test_a_repeat_equals_counting_by_hand_across_documents() -> None:
    chance = np.random.default_rng(0)
    for _ in range(50):
        rows, documents = chance.integers(0, 2, (3, 9)), np.sort(chance.integers(0, 4, (3, 9)), axis=1)
        by_hand = max(
            len(list(run))
            for row, document in zip(rows.tolist(), documents.tolist(), strict=True)
            for _, run in groupby(zip(row, document, strict=True))
        )
        tokens = find_tokens({"tokens": rows, "document_ids": documents})
        assert tokens is not None
        assert int(longest_repeat(tokens.ids, None, tokens.joined)) == by_hand


def test_micro_batches_have_the_hash_of_their_whole(tmp_path: Path) -> None:
    whole = torch.randint(0, 50, (6, 7), generator=torch.Generator().manual_seed(1))
    model = nn.Embedding(50, 2)
    exporter = watch(model, torch.optim.SGD(model.parameters(), lr=0.1), tmp_path)
    for part in torch.split(whole, [1, 3, 2]):
        exporter.batch(part)
    exporter.step(1.0)
    (record,) = steps(exporter, tmp_path)
    assert record.value("batch_hash") == float(hash_of(whole.reshape(-1)))
    assert record.value("batch_unique_token_ratio") == len(set(whole.reshape(-1).tolist())) / 42
    assert int(hash_of(torch.tensor([2**63 - 1, -(2**63)]))) == (2**63 * SPREAD + (1 - 2**63) * 3 * SPREAD) % MODULUS


CLASSES = {"digit": [3, 4], "padding": 0}
PADDED = torch.tensor([[3, 4, 1, 10**15, 0, 0], [3, -7, 5, 5, 5, 0]])


@pytest.mark.parametrize(
    ("batch", "digit", "padding"),
    [
        ([PADDED], 3 / 9, 3 / 12),
        ([{"input_ids": PADDED, "attention_mask": (PADDED != 0).long()}], 3 / 9, 3 / 12),
        (
            [{"input_ids": PADDED, "attention_mask": torch.ones(2, 6)}],
            3 / 9,
            3 / 12,
        ),  # a float mask is none that is known
        ([{"input_ids": PADDED, "attention_mask": torch.ones(2, 6, dtype=torch.bool)}], 3 / 12, 0.0),
        (
            [PADDED[:1], {"input_ids": PADDED[1:], "attention_mask": torch.ones(1, 6, dtype=torch.int64)}],
            3 / 10,
            2 / 12,
        ),
        ([torch.zeros(2, 3, dtype=torch.int64)], None, 1.0),
    ],
)
def test_shares_of_digits_and_padding_equal_counting_by_hand(
    tmp_path: Path, batch: list[Any], digit: float | None, padding: float
) -> None:
    model = nn.Embedding(8, 2)
    exporter = watch(model, torch.optim.SGD(model.parameters(), lr=0.1), tmp_path, token_classes=CLASSES)
    for part in batch:
        exporter.batch(part)
    exporter.step(1.0)
    (record,) = steps(exporter, tmp_path)
    share = {"padding": padding} if digit is None else {"digit": digit, "padding": padding}
    assert record.signals["batch_token_share"] == pytest.approx(share)


def test_the_share_of_padding_needs_no_mapping_where_a_mask_says_it(tmp_path: Path) -> None:
    record = first_record(tmp_path, {"input_ids": IDS, "attention_mask": MASK})
    assert record.signals["batch_token_share"] == {"padding": 0.25}
    assert "batch_token_share" not in first_record(tmp_path / "bare", {"input_ids": IDS}).signals


def test_every_class_of_tokens_is_on_the_page_from_the_start(tmp_path: Path) -> None:
    model = nn.Embedding(6, 2)
    exporter = watch(model, torch.optim.SGD(model.parameters(), lr=0.1), tmp_path)
    with urllib.request.urlopen(f"http://127.0.0.1:{exporter.port}/metrics", timeout=10) as answer:
        page = answer.read().decode()
    exporter.close()
    for name in ("digit", "padding"):
        assert f'train_batch_token_share{{class="{name}",rank="0",run="run"}} NaN' in page


def test_the_fingerprint_is_a_small_part_of_a_step() -> None:
    torch.set_num_threads(1)
    ids = torch.randint(0, 50_000, (4, 512))
    batch = {"input_ids": ids, "labels": ids, "attention_mask": torch.ones_like(ids)}
    watched = SimpleNamespace(vocabulary=50_000)
    probe = Fingerprint(TokenClasses({"digit": range(1000), "padding": 0}))

    def seconds() -> float:
        began = time.process_time()
        for _ in range(20):
            probe.close(Closing(Sheet(), cast(Any, watched), None, None, [batch]))
        return (time.process_time() - began) / 20

    seconds()
    assert min(seconds() for _ in range(10)) < 0.0015, "1 % of 150 ms, what 2,048 tokens cost ten million parameters"
