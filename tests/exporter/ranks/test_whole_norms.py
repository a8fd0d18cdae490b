"""Norms under sharding are those of one process that trains the same, by group, on every rank; and the mean loss is."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.exporter.ranks.harness import records, run
from tests.exporter.runs import loss_of, make, steps, watch
from trainwarden.record import Step

STEPS, WORLD = 12, 4

BODY = """
mode, kind, clipped = os.environ["MODE"], os.environ["KIND"], os.environ["CLIPPED"] == "1"
model = make()
if mode == "fsdp2":
    from torch.distributed.fsdp import fully_shard
    for part in (model.attn, model.mlp):
        fully_shard(part)
    fully_shard(model)
elif mode == "hsdp":
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    fully_shard(model, mesh=init_device_mesh("cpu", (2, 2), mesh_dim_names=("copies", "shards")))
else:
    from torch.nn.parallel import DistributedDataParallel
    model = DistributedDataParallel(model)
if kind == "adamw":
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
else:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
exporter = watch(model, optimizer, folder, cadence=3)
for step in range(1, STEPS + 1):
    optimizer.zero_grad()
    loss = loss_of(model, 10 * step + rank)
    loss.backward()
    if clipped:
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
    optimizer.step()
    exporter.step(loss)
exporter.close()
say(notices=exporter.notices)
"""


def one_process(folder: Path, kind: str, clipped: bool) -> list[Step]:
    """Train what the ranks train together: the mean of their losses."""
    model = make()
    optimizer: torch.optim.Optimizer
    if kind == "adamw":
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    else:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    exporter = watch(model, optimizer, folder, run="one", cadence=3)
    for step in range(1, STEPS + 1):
        optimizer.zero_grad()
        loss = torch.stack([loss_of(model, 10 * step + rank) for rank in range(WORLD)]).mean()
        loss.backward()
        if clipped:
            torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        exporter.step(loss)
    return steps(exporter, folder, run="one")


#: Global signals that must be those of one process.
WHOLE = (
    "grad_norm",
    "weight_rms",
    "moment_rms",
    "update_ratio",
    "update_applied_ratio",
    "grad_zero_ratio",
    "clip_ratio",
    "clipped_steps",
)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("mode", "kind", "clipped"),
    [("fsdp2", "adamw", True), ("fsdp2", "sgd", False), ("hsdp", "adamw", False), ("ddp", "adamw", True)],
)
def test_global_signals_are_those_of_one_process(tmp_path: Path, mode: str, kind: str, clipped: bool) -> None:
    environment = {"MODE": mode, "KIND": kind, "CLIPPED": str(int(clipped))}
    ended = run(f"STEPS = {STEPS}\n" + BODY, tmp_path, WORLD, environment)
    assert [each.said["notices"] for each in ended] == [[]] * WORLD
    reference = one_process(tmp_path, kind, clipped)
    ranks = [records(tmp_path, rank) for rank in range(WORLD)]
    assert [len(own) for own in ranks] == [STEPS] * WORLD
    for place, whole in enumerate(reference):
        own = [each[place] for each in ranks]
        for name in WHOLE:
            found, wanted = own[0].signals.get(name), whole.signals.get(name)
            assert _close(found, wanted), (whole.step, name, found, wanted)
            assert all(each.signals.get(name) == found for each in own), name  # the same bits on all ranks
        losses = [each.value("rank_loss") for each in own]
        assert own[0].value("loss") == pytest.approx(sum(losses) / WORLD, rel=1e-6)  # type: ignore[arg-type]
        assert own[0].value("loss") == pytest.approx(whole.value("loss"), rel=1e-5)
        stats = own[0].ranks["loss"]
        assert (stats.min, stats.max, stats.n) == (min(losses), max(losses), WORLD)  # type: ignore[type-var]
        assert stats.argmax == losses.index(stats.max)
        assert all(each.ranks == own[0].ranks for each in own)


def _close(found: Any, wanted: Any) -> bool:
    """Say whether a value, grouped or not, is the wanted one to 1e-5."""
    if isinstance(wanted, dict):
        same = isinstance(found, dict) and found.keys() == wanted.keys()
        return same and all(_close(found[name], wanted[name]) for name in wanted)
    return bool(found == wanted if None in (found, wanted) else found == pytest.approx(wanted, rel=1e-5, abs=1e-9))
