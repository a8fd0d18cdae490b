"""FullyShardedDataParallel, the first version: nothing that is only a part passes for the whole, and that is said."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.exporter.ranks.harness import records, run

BODY = """
from torch.distributed.fsdp import FullyShardedDataParallel
model = FullyShardedDataParallel(make(), use_orig_params=True, device_id=torch.device("cpu"))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
exporter = watch(model, optimizer, folder, cadence=2)
for step in range(1, 7):
    optimizer.zero_grad()
    loss = loss_of(model, 10 * step + rank)
    loss.backward()
    optimizer.step()
    exporter.step(loss)
exporter.close()
say(notices=exporter.notices)
"""


@pytest.mark.slow
def test_under_fsdp1_global_norms_are_absent_and_that_is_said(tmp_path: Path) -> None:
    ended = run(BODY, tmp_path, world=2)
    for each in ended:
        assert [notice for notice in each.said["notices"] if "FullyShardedDataParallel" in notice]
        own = records(tmp_path, each.rank)
        assert len(own) == 6
        for one in own:
            assert {"grad_norm", "weight_rms", "moment_rms", "update_ratio", "grad_zero_ratio"}.isdisjoint(one.signals)
            assert "param_hash" not in one.signals, "shards are no replicas"
            assert one.value("shard_grad_norm") is not None
            assert one.ranks["loss"].n == 2
