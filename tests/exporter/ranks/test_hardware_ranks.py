"""The hottest rank is named in every rank's records, although each reads its own GPU at its own time."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.exporter.nvml import UUID, Machine, build, need_binding
from tests.exporter.ranks.harness import ROOT, records, run

BODY = """
from torch.nn.parallel import DistributedDataParallel
from trainwarden.exporter.hardware import Used, poller

poller.used_by = lambda parameters: Used(os.environ["NVML_UUID"])
model = DistributedDataParallel(make())
optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
exporter = watch(model, optimizer, folder, hardware_seconds=0.2, cadence=5)
for step in range(1, 121):
    optimizer.zero_grad()
    loss = loss_of(model, step)
    loss.backward()
    optimizer.step()
    exporter.step(loss)
    time.sleep(0.02)
exporter.close()
say(notices=exporter.notices)
dist.barrier()
end()
"""


@pytest.mark.slow
def test_the_hottest_rank_is_named_in_the_records_of_all(tmp_path: Path) -> None:
    need_binding()
    import pynvml

    library = build(tmp_path / "nvml")
    of_rank = {}
    for rank, degrees in enumerate((61, 88)):
        machine = Machine(tmp_path / f"nvml.{rank}")
        machine.says(temperature=degrees)
        if rank == 1:
            machine.xid(79)
        of_rank[rank] = {"NVML_SAYS": str(machine.file)}
    environment = {
        "LD_LIBRARY_PATH": str(library.parent),
        "NVML_UUID": UUID,
        "PYTHONPATH": f"{ROOT}{os.pathsep}{Path(pynvml.__file__).parent}",
    }
    ended = run(BODY, tmp_path, world=2, environment=environment, of_rank=of_rank)
    for rank in range(2):
        assert ended[rank].said == {"notices": []}
        steps = records(tmp_path, rank=rank)
        found = [step.ranks["gpu_temperature_celsius"] for step in steps if "gpu_temperature_celsius" in step.ranks]
        whole = [one for one in found if one.n == 2]
        # At each regular step, not only where both were read anew: what is compared is the newest of each.
        assert len(whole) >= 10
        assert {(one.min, one.max, one.argmax) for one in whole} == {(61.0, 88.0, 1)}
        faults = [step.ranks["gpu_faults"] for step in steps if "gpu_faults" in step.ranks]
        assert [(one.sum, one.argmax) for one in faults] == [(1.0, 1)]
