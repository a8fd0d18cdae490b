"""Inside models that are spread over ranks: each rank sees what it computes, under the model's own names, without a collective."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.exporter.gpt import Outputs, batch, gpt, loss_on
from tests.exporter.ranks.harness import records, run

BODY = """
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from tests.exporter.gpt import batch, gpt, loss_on

for kind in ("ddp", "fsdp2"):
    model = gpt(checkpointing="plain")
    if kind == "ddp":
        model = DistributedDataParallel(model)
    else:
        for layer in model.h:
            fully_shard(layer)
        fully_shard(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    exporter = watch(model, optimizer, folder, run=kind, cadence=1)
    for step in (1, 2):
        optimizer.zero_grad()
        loss = loss_on(model, batch(10 * step + rank))
        loss.backward()
        optimizer.step()
        exporter.step(loss)
        with torch.no_grad():
            loss_on(model, batch(99))
    exporter.close()
    say(**{kind: exporter.notices})
dist.barrier()
end()
"""


@pytest.mark.slow
def test_activations_of_ddp_and_fsdp2_are_each_ranks_own(tmp_path: Path) -> None:
    ended = run(BODY, tmp_path, world=2)
    for rank in range(2):
        assert ended[rank].said == {"ddp": [], "fsdp2": []}
        model = gpt()
        outputs = Outputs(model, ["h.0", "h.1", "h.2"])
        loss_on(model, batch(10 + rank))
        for kind in ("ddp", "fsdp2"):
            first, second = records(tmp_path, run=kind, rank=rank)
            for number in range(3):
                assert first.value("block_rms", str(number)) == pytest.approx(outputs.rms(f"h.{number}"), rel=1e-5)
                assert first.value("block_absmax", str(number)) == pytest.approx(
                    outputs.absmax(f"h.{number}"), rel=1e-5
                )
            assert second.value("residual_rms") == second.value("block_rms", "2")
            assert second.value("nonfinite", "activation") == 0.0
            assert set(second.signals["grad_row_max"]) == {"token", "position"}  # type: ignore[arg-type]
            assert set(second.signals["attention_logit"]) == {"bound", "sampled"}  # type: ignore[arg-type]
