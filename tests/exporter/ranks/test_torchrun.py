"""The exporter under torchrun itself, as a user starts it: four workers, FSDP2, one agent's store."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from tests.exporter.ranks.harness import ROOT, records
from tests.exporter.runs import headers

SCRIPT = """
import os, sys
from pathlib import Path
import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard
from tests.exporter.runs import loss_of, make, watch

dist.init_process_group("gloo")
model = fully_shard(make())
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
exporter = watch(model, optimizer, Path(sys.argv[1]))
for step in range(1, 21):
    optimizer.zero_grad()
    loss = loss_of(model, 10 * step + dist.get_rank())
    loss.backward()
    optimizer.step()
    exporter.step(loss)
exporter.close()
sys.stdout.flush()
os._exit(1 if exporter.notices else 0)
"""


@pytest.mark.slow
def test_torchrun_starts_ranks_that_combine_what_they_see(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(textwrap.dedent(SCRIPT))
    done = subprocess.run(
        [
            sys.executable,
            "-m",
            "torch.distributed.run",
            "--standalone",
            "--nproc-per-node=4",
            str(script),
            str(tmp_path),
        ],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    ranks = [records(tmp_path, rank) for rank in range(4)]
    assert [len(own) for own in ranks] == [20] * 4
    for own in zip(*ranks, strict=True):
        assert len({each.value("grad_norm") for each in own}) == 1
        assert own[0].value("grad_norm") is not None
        assert own[0].ranks["loss"].n == 4
    assert len({headers(tmp_path, rank=rank)[0].start_id for rank in range(4)}) == 1
