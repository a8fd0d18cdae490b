"""Clipping of sharded gradients: the trainer's own norms are used and nothing it computes changes by a bit."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.exporter.ranks.harness import run

BODY = """
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

calls, real = 0, torch._foreach_norm
def counting(*args, **kwargs):
    global calls
    calls += 1
    return real(*args, **kwargs)
torch._foreach_norm = counting

def train(watched, shape):
    global calls
    model = fully_shard(make(width=6), mesh=init_device_mesh("cpu", shape, mesh_dim_names=("copies", "shards")[-len(shape):]))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    run = f"run-{len(shape)}"
    exporter = watch(model, optimizer, folder, run=run, cadence=1000, watch_steps=0, own_gradients=False) if watched else None
    totals, counts = [], []
    for step in range(1, 5):
        optimizer.zero_grad()
        loss = loss_of(model, 10 * step + rank)
        loss.backward()
        calls = 0
        total = torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        if exporter is not None:
            exporter.step(loss)
        counts.append(calls)
        totals.append(total.full_tensor())
    if exporter is not None:
        exporter.close()
        assert exporter.notices == [], exporter.notices
    return totals, [parameter.full_tensor().detach() for parameter in model.parameters()], counts

for shape in ((4,), (2, 2)):
    alone, watched = train(False, shape), train(True, shape)
    same = all(torch.equal(a, b) for ours, theirs in zip(alone[:2], watched[:2]) for a, b in zip(ours, theirs))
    say(**{str(shape): [same, alone[2][1:], watched[2][1:]]})
"""


@pytest.mark.slow
def test_clipping_sharded_gradients_is_the_same_to_the_bit_and_takes_no_norm_twice(tmp_path: Path) -> None:
    for each in run(BODY, tmp_path):
        for shape in ("(4,)", "(2, 2)"):
            same, alone, watched = each.said[shape]
            assert same
            assert watched == alone  # behind the first step, in which the costly probes take norms of their own
