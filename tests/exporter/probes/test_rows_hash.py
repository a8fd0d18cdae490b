"""The hash of a batch's sequences in any order: equal for the same sequences, another for anything else."""

from __future__ import annotations

from pathlib import Path

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from tests.exporter.runs import make, steps, watch
from trainwarden.exporter.probes.fingerprint import rows_hash


def by_hand(rows: list[list[int]]) -> int:
    total = 0
    for row in rows:
        found = 0
        for place, token in enumerate(row):
            factor = (2 * place + 1) * 2654435769 % 2**32
            found = (found + (token + 1) * factor) % 2**32
        for _ in range(2):
            found = (found ^ (found >> 16)) * 73244475 % 2**32
        total += found ^ (found >> 16)
    return total % 2**32


@settings(max_examples=60, deadline=None)
@given(data=st.data(), height=st.integers(1, 6), width=st.integers(1, 9))
def test_it_is_what_whole_numbers_of_any_size_give_and_the_order_of_rows_is_all_the_same(
    data: st.DataObject, height: int, width: int
) -> None:
    token = st.integers(-3, 2**31 - 1)
    rows = data.draw(st.lists(st.lists(token, min_size=width, max_size=width), min_size=height, max_size=height))
    assert int(rows_hash(torch.tensor(rows))) == by_hand(rows)
    shuffled = data.draw(st.permutations(rows))
    assert int(rows_hash(torch.tensor(shuffled))) == by_hand(rows)


def test_tokens_that_change_their_row_or_their_place_change_it() -> None:
    rows = torch.arange(24).reshape(4, 6)
    crossed = rows.clone()
    crossed[0, 2], crossed[1, 2] = rows[1, 2], rows[0, 2]
    turned = rows.flip(1)
    assert len({int(rows_hash(one)) for one in (rows, crossed, turned)}) == 3


def test_a_record_holds_it_whatever_the_micro_batches(tmp_path: Path) -> None:
    model = make()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    exporter = watch(model, optimizer, tmp_path)
    ids = torch.randint(31, (6, 9), generator=torch.Generator().manual_seed(0))
    for parts in ([ids], [ids.flip(0)], [ids[:2], ids[2:]], [ids + 0, ids[:1]]):
        optimizer.zero_grad()
        for part in parts:
            exporter.batch(part)
            nn.functional.cross_entropy(model(part[:, :-1]).flatten(0, 1), part[:, 1:].flatten()).backward()
        optimizer.step()
        exporter.step(1.0)
    hashes = [(step.value("batch_rows_hash"), step.value("batch_hash")) for step in steps(exporter, tmp_path)]
    rows = [own for own, _ in hashes]
    assert rows[0] == rows[1] == rows[2] == float(by_hand(ids.tolist()))
    assert rows[3] != rows[0]
    assert hashes[0][1] != hashes[1][1]
