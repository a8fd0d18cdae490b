"""Rows of a table that is split over ranks have their own numbers, and a rank that holds no whole row says nothing."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.exporter.ranks.harness import run
from tests.exporter.runs import events, lines
from trainwarden.record import Step

BODY = """
from torch.distributed.fsdp import fully_shard
from tests.exporter.gpt import batch, gpt, loss_on

model = gpt(tied=False)
fully_shard(model)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
exporter = watch(model, optimizer, folder, cadence=1)
for step in range(1, 12):
    optimizer.zero_grad()
    loss = loss_on(model, batch(10 * step + rank, rows=8))
    loss.backward()
    optimizer.step()
    if step == 5 and rank == 1:  # of 31 rows rank 0 has 16
        with torch.no_grad():
            model.wte.weight._local_tensor[4] = 80.0
    exporter.step(loss)
exporter.close()
say(notices=exporter.notices)
dist.barrier()
end()
"""

PLACED = """
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset
from trainwarden.exporter.tables import rows_of

whole = torch.arange(31.0).unsqueeze(1).repeat(1, 4)
line, grid = init_device_mesh("cpu", (4,)), init_device_mesh("cpu", (2, 2))
found = {}
for name, mesh, placements in (
    ("rows", line, [Shard(0)]),
    ("whole", line, [Replicate()]),
    ("columns", line, [Shard(1)]),
    ("hybrid", grid, [Replicate(), Shard(0)]),
    ("twice", grid, [Shard(0), Shard(0)]),
    ("both", grid, [Shard(0), Shard(1)]),
):
    one = distribute_tensor(whole, mesh, placements)
    held = rows_of(one)
    if held is None:
        found[name] = None
        continue
    _, offset = compute_local_shape_and_global_offset(one.shape, mesh, placements)
    rows, first = held
    found[name] = [first == offset[0], bool(torch.equal(rows, whole[first : first + len(rows)]))]
say(**found)
dist.barrier()
end()
"""


@pytest.mark.slow
def test_the_rank_that_holds_a_damaged_row_names_it_by_its_token(tmp_path: Path) -> None:
    ended = run(BODY, tmp_path, world=2)
    assert [one.said["notices"] for one in ended] == [[], []]
    assert events(tmp_path, "embedding_rows", rank=0) == []
    (event,) = events(tmp_path, "embedding_rows", rank=1)
    assert (event.fields["table"], event.fields["ids"], event.fields["long"]) == ("token", [20], 1)
    found = {rank: _last(tmp_path, rank) for rank in range(2)}
    assert found[1].value("embedding_row_argmax", "token") == 20
    assert found[0].value("embedding_row_argmax", "token") < 16  # type: ignore[operator]
    assert found[0].value("embedding_rows_long", "token") == 0


def _last(folder: Path, rank: int) -> Step:
    looked: list[Any] = [
        line for line in lines(folder, rank=rank) if isinstance(line, Step) and "embedding_row_max" in line.signals
    ]
    found: Step = looked[-1]
    assert found.step == 11
    return found


@pytest.mark.slow
def test_the_first_row_of_a_shard_is_where_torch_puts_it(tmp_path: Path) -> None:
    for one in run(PLACED, tmp_path, world=4):
        assert one.said == {
            "rows": [True, True],
            "whole": [True, True],
            "columns": None,
            "hybrid": [True, True],
            "twice": [True, True],
            "both": None,
        }
