"""Two ranks over gloo: one identity, one journal and one port each, the reduced gradient's norm on both."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from tests.exporter.runs import events, headers, lines
from tests.real import free_port
from trainwarden.record import Step

SCRIPT = textwrap.dedent(
    """
    import os, sys
    from pathlib import Path
    import torch
    import torch.distributed as dist
    from torch.nn.parallel import DistributedDataParallel
    from tests.exporter.runs import make, loss_of, watch
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    model = DistributedDataParallel(make())
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    exporter = watch(model, optimizer, Path(sys.argv[1]), cadence=2)
    print(rank, exporter.port, flush=True)
    for step in range(1, 5):
        optimizer.zero_grad()
        loss = loss_of(model, 10 * step + rank)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        exporter.step(loss)
    exporter.close()
    dist.barrier()
    dist.destroy_process_group()
    sys.stdout.flush()
    os._exit(1 if exporter.notices else 0)  # torch sometimes aborts while the interpreter exits
    """
)


def launch(folder: Path, environment: dict[str, str], world: int = 2) -> list[str]:
    port = str(free_port())
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", SCRIPT, str(folder)],
            env={
                **os.environ,
                "RANK": str(rank),
                "LOCAL_RANK": str(rank),
                "WORLD_SIZE": str(world),
                "MASTER_ADDR": "127.0.0.1",
                "MASTER_PORT": port,
                "OMP_NUM_THREADS": "1",
                **environment,
            },
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(world)
    ]
    out = [process.communicate(timeout=120) for process in processes]
    assert [process.returncode for process in processes] == [0] * world, out
    return [stdout for stdout, _ in out]


@pytest.mark.slow
def test_ranks_share_one_identity_and_keep_journals_of_their_own(tmp_path: Path) -> None:
    launch(tmp_path, {"TORCHELASTIC_RUN_ID": "one"})
    first = [headers(tmp_path, rank=rank)[0] for rank in (0, 1)]
    assert [header.rank for header in first] == [0, 1]
    assert len({(header.run_uid, header.attempt, header.start_id) for header in first}) == 1
    started = [events(tmp_path, "start", rank=rank)[0].fields for rank in (0, 1)]
    assert [fields["world_size"] for fields in started] == [2, 2]
    assert [fields["model"] for fields in started] == ["Block", "Block"]

    records = [[line for line in lines(tmp_path, rank=rank) if isinstance(line, Step)] for rank in (0, 1)]
    for own, other in zip(*records, strict=True):
        assert own.value("grad_norm") == other.value("grad_norm")
        assert own.signals.get("update_ratio") == other.signals.get("update_ratio")
        losses = [each.value("rank_loss") or 0.0 for each in (own, other)]
        assert own.value("loss") == other.value("loss") == sum(losses) / 2
        assert losses[0] != losses[1]
        assert (own.value("weight_rms") is not None) == (own.step == 1 or own.step % 2 == 0)

    launch(tmp_path, {"TORCHELASTIC_RUN_ID": "one"})  # the same launch, its workers started again
    launch(tmp_path, {"TORCHELASTIC_RUN_ID": "two"})
    assert [header.attempt for header in headers(tmp_path, rank=1)] == [0, 0, 1]
    assert len({header.start_id for header in headers(tmp_path, rank=1)}) == 3
    assert json.loads((tmp_path / "run" / "run.json").read_text())["run_uid"] == first[0].run_uid
