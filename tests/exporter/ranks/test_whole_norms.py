"""Norms under sharding are those of one process that trains the same, by group, on every rank; the loss is the ranks' mean."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

from tests.exporter.ranks.harness import close, records, run
from tests.exporter.runs import loss_of, make, steps, watch
from trainwarden.record import Step

STEPS, WORLD = 12, 4


@dataclass(frozen=True)
class Case:
    """How a model is spread over the ranks and trained. Of width 6, ranks hold uneven and even empty shards."""

    mode: str
    optimizer: str
    clipped: bool
    width: int = 8

    @property
    def name(self) -> str:
        return f"{self.mode}-{self.optimizer}-{'clipped' if self.clipped else 'free'}-{self.width}"

    def data(self, rank: int) -> int:
        """Which part of the data a rank reads: the two of a pair that splits its products read the same."""
        return rank // 2 if self.mode == "tp" else rank


CASES = (
    Case("fsdp2", "adamw", True),
    Case("fsdp2", "adamw", False, width=6),
    Case("fsdp2", "sgd", True, width=6),
    Case("fsdp2", "sgd", False),
    Case("hsdp", "adamw", True),
    Case("tp", "adamw", False),
    Case("tp", "sgd", False),  # torch does not clip gradients of two meshes together
    Case("ddp", "adamw", True),
    Case("ddp", "sgd", False),
)

BODY = """
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

def spread(model, mode):
    if mode == "fsdp2":
        for part in (model.attn, model.mlp):
            fully_shard(part)
        return fully_shard(model)
    if mode == "hsdp":
        return fully_shard(model, mesh=init_device_mesh("cpu", (2, 2), mesh_dim_names=("copies", "shards")))
    if mode == "tp":  # two of the products are split over pairs of ranks, the rest is copied; all of it is sharded between pairs
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("shards", "pairs"))
        plan = {"attn": ColwiseParallel(output_layouts=Replicate()), "mlp": RowwiseParallel(input_layouts=Replicate())}
        return fully_shard(parallelize_module(model, mesh["pairs"], plan), mesh=mesh["shards"])
    return DistributedDataParallel(model)

for mode, kind, clipped, width in CASES:
    model = spread(make(width=width), mode)
    if kind == "adamw":
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    else:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    name = f"{mode}-{kind}-{'clipped' if clipped else 'free'}-{width}"
    exporter = watch(model, optimizer, folder, run=name, cadence=3)
    for step in range(1, STEPS + 1):
        optimizer.zero_grad()
        loss = loss_of(model, 10 * step + (rank // 2 if mode == "tp" else rank))
        loss.backward()
        if clipped:
            torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        exporter.step(loss)
    exporter.close()
    say(**{name: exporter.notices})
"""


@pytest.fixture(scope="module")
def spread_out(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Train all cases on the ranks, one after another, and return the folder of their runs."""
    folder = tmp_path_factory.mktemp("spread")
    cases = [(case.mode, case.optimizer, case.clipped, case.width) for case in CASES]
    ended = run(f"STEPS, CASES = {STEPS}, {cases}\n{BODY}", folder, WORLD)
    assert [each.said for each in ended] == [{case.name: [] for case in CASES}] * WORLD
    return folder


def one_process(folder: Path, case: Case) -> list[Step]:
    """Train what the ranks train together: the mean of their losses."""
    model = make(width=case.width)
    optimizer: torch.optim.Optimizer
    if case.optimizer == "adamw":
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    else:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    exporter = watch(model, optimizer, folder, run="one", cadence=3)
    for step in range(1, STEPS + 1):
        optimizer.zero_grad()
        loss = torch.stack([loss_of(model, 10 * step + case.data(rank)) for rank in range(WORLD)]).mean()
        loss.backward()
        if case.clipped:
            torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        exporter.step(loss)
    return steps(exporter, folder, run="one")


#: Signals that must be those of one process.
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
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_global_signals_are_those_of_one_process_and_the_same_on_all_ranks(
    spread_out: Path, tmp_path: Path, case: Case
) -> None:
    reference = one_process(tmp_path, case)
    ranks = [records(spread_out, rank, case.name) for rank in range(WORLD)]
    assert [len(own) for own in ranks] == [STEPS] * WORLD
    for place, whole in enumerate(reference):
        own = [each[place] for each in ranks]
        for name in WHOLE:
            found, wanted = own[0].signals.get(name), whole.signals.get(name)
            assert close(found, wanted), (whole.step, name, found, wanted)
            assert all(each.signals.get(name) == found for each in own), name  # to the last bit
        if case.clipped and whole.step == 1:
            assert whole.value("clip_ratio") is not None
        losses = [each.value("rank_loss") or 0.0 for each in own]
        assert own[0].value("loss") == pytest.approx(sum(losses) / WORLD, rel=1e-6)
        assert own[0].value("loss") == pytest.approx(whole.value("loss"), rel=1e-5)
        stats = own[0].ranks["loss"]
        assert (stats.min, stats.max, stats.n) == (min(losses), max(losses), WORLD)
        assert stats.argmax == losses.index(stats.max)
        assert all(each.ranks == own[0].ranks for each in own)
