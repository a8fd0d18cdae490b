"""Under FSDP2 a rank's own gradient norm is taken where it goes into the reduce-scatter, where torch lets one choose that."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.exporter.ranks.harness import records, run

BODY = """
import copy
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.fsdp._fully_shard._fsdp_collectives import DefaultReduceScatter, ProcessGroupAllocReduceScatter

torch.set_num_threads(1)
STEPS = 4

class Deep(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList([make(seed) for seed in (1, 2)])
    def forward(self, ids):
        return self.blocks[0](ids) + self.blocks[1](ids)

class Counting(DefaultReduceScatter):
    calls = 0
    def __call__(self, *args, **kwargs):
        Counting.calls += 1
        return super().__call__(*args, **kwargs)

def train(case, watched):
    torch.manual_seed(3)
    plain = Deep()
    model = copy.deepcopy(plain)
    mesh = init_device_mesh("cpu", case.get("mesh", (world,)), mesh_dim_names=("dp", "shard")[-len(case.get("mesh", (world,))):])
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    if case.get("custom"):
        model.blocks[0].set_custom_reduce_scatter(Counting())
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    beside = torch.optim.AdamW(plain.parameters(), lr=1e-2)
    exporter = watch(model, optimizer, folder, run=case["name"], cadence=1) if watched else None
    wanted = []
    for step in range(STEPS):
        own = copy.deepcopy(plain).double()
        for micro in range(case.get("micro", 1)):
            last = micro == case.get("micro", 1) - 1
            if case.get("sync_last"):
                model.set_requires_gradient_sync(last)
            seed = 100 * step + 10 * micro + rank
            loss_of(own, seed).backward()
            loss = loss_of(model, seed)
            loss.backward()
            for other in range(world):
                (loss_of(plain, 100 * step + 10 * micro + other) / world).backward()
        wanted.append(float(torch.stack([p.grad.double().norm() for p in own.parameters()]).norm()))
        optimizer.step(); optimizer.zero_grad()
        beside.step(); beside.zero_grad()
        if exporter:
            exporter.step(loss)
    if exporter:
        exporter.close()
    kinds = [type(state._fsdp_param_group._reduce_scatter_comm).__name__ for state in (block._get_fsdp_state() for block in model.blocks)]
    return [p.to_local().detach().clone() for p in model.parameters()], wanted, exporter, kinds

for case in [
    dict(name="plain"),
    dict(name="hybrid", mesh=(2, 2)),
    dict(name="synced-last", micro=3, sync_last=True),
    dict(name="synced-each", micro=2),
    dict(name="custom", custom=True),
]:
    unwatched, _, _, before = train(case, False)
    seen, wanted, exporter, after = train(case, True)
    same = all(torch.equal(a, b) for a, b in zip(unwatched, seen))
    say(**{case["name"]: {"same": same, "wanted": wanted, "notices": exporter.notices, "put_back": before == after}})
say(counted=Counting.calls)
"""


@pytest.mark.slow
def test_each_rank_records_the_norm_of_what_it_gives_to_the_reduce_scatter(tmp_path: Path) -> None:
    ended = run(BODY, tmp_path)
    for rank in ended:
        for name in ("plain", "hybrid", "synced-last", "synced-each", "custom"):
            said = rank.said[name]
            own = [step.value("rank_grad_norm") for step in records(tmp_path, rank.rank, name)]
            assert said["same"], name
            assert said["put_back"], name
            if name == "synced-each":  # two parts of one gradient, of whose sum nothing is known
                assert own == [None] * 4
            elif name == "custom":
                assert own == [None] * 4
                assert [one for one in said["notices"] if "reduce-scatter of its own" in one] == said["notices"] != []
            else:
                assert own == pytest.approx(said["wanted"], rel=1e-5), name
                assert said["notices"] == []
            # Nothing is replicated, so nothing can drift apart.
            assert [step.value("param_hash") for step in records(tmp_path, rank.rank, name)] == [None] * 4
        assert rank.said["counted"] > 0
    first = [records(tmp_path, rank, "plain")[0].value("rank_grad_norm") for rank in range(4)]
    assert len(set(first)) == 4
