"""A close look under DDP and FSDP2: each rank looks at its own, no collective is added, and the training stays the same to the bit."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.exporter.planted import RootAtZero, line_of
from tests.exporter.ranks.harness import run
from tests.exporter.runs import events

BODY = """
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from tests.exporter.gpt import batch, loss_on
from tests.exporter.planted import RootAtZero, planted
from tests.exporter.seams import Watch

def train(kind, watched):
    model, fault = planted(RootAtZero)
    if kind == "ddp":
        model = DistributedDataParallel(model)
    else:
        for layer in model.h:
            fully_shard(layer)
        fully_shard(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
    exporter = watch(model, optimizer, folder, run=kind, anomaly=(2, 3), side_group=False) if watched else None
    losses = []
    caught = []
    for step in range(1, 6):
        optimizer.zero_grad()
        fault.on = step == 3 and rank == 1
        with Watch() as watching:
            loss = loss_on(model, batch(10 * step + rank))
            loss.backward()
            optimizer.step()
            if exporter is not None and step > 1:
                exporter.step(loss.detach())
        if exporter is not None and step == 1:
            exporter.step(loss.detach())
        caught += watching.caught if watched and step > 2 else []
        losses.append(loss.item())
    if exporter is not None:
        exporter.close()
        assert exporter.notices == [], exporter.notices
        say(**{f"{kind} caught": caught})
    full = [getattr(parameter, "full_tensor", lambda: parameter)().detach().nan_to_num(7.0) for parameter in model.parameters()]
    return losses, full

for kind in ("ddp", "fsdp2"):
    alone, watched = train(kind, False), train(kind, True)
    say(**{kind: [repr(alone[0]) == repr(watched[0]), all(map(torch.equal, alone[1], watched[1]))]})
dist.barrier()
end()
"""


@pytest.mark.slow
def test_the_rank_whose_backward_made_it_names_operation_and_line_and_the_others_say_that_it_came_by_the_reduction(
    tmp_path: Path,
) -> None:
    ended = run(BODY, tmp_path, world=2)
    for kind in ("ddp", "fsdp2"):
        for rank in range(2):
            assert ended[rank].said[kind] == [True, True]
            assert ended[rank].said[f"{kind} caught"] == []
        told = {
            rank: [
                event for event in events(tmp_path, "anomaly", run=kind, rank=rank) if event.fields["state"] == "found"
            ]
            for rank in range(2)
        }
        guilty, other = told[1][0], told[0][0]
        assert (guilty.step, guilty.fields["stage"], guilty.fields["op"]) == (3, "backward", "SqrtBackward0")
        assert (guilty.fields["module"], guilty.fields["at"]) == ("h.1.mlp.1", line_of(RootAtZero))
        assert (other.step, other.fields["stage"]) == (3, "reduction")
        for rank in range(2):
            assert events(tmp_path, "anomaly", run=kind, rank=rank)[-1].fields["looked"] == 3
