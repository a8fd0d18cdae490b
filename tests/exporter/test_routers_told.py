"""What a script tells of its routers: it counts once, in the place of what cannot be found, and what cannot be meant is a notice."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from tests.exporter.runs import steps, watch
from tests.exporter.test_routers import Model, agree, ids_of, loss_on, reference
from trainwarden.exporter.probes.router import RouterLoad
from trainwarden.exporter.sheet import Reading

torch.set_num_threads(1)


class Hidden(nn.Module):
    """An MoE that nothing tells: it tells the exporter itself, within its forward."""

    def __init__(self, tell: Callable[..., None], checkpointing: bool = False) -> None:
        super().__init__()
        self.wte, self.choose = nn.Embedding(31, 8), nn.Parameter(torch.randn(8, 5))
        self.blocks = nn.ModuleList(nn.Sequential(nn.LayerNorm(8), nn.Linear(8, 8)) for _ in range(2))
        self.head = nn.Linear(8, 31)
        self.tell, self.checkpointing = tell, checkpointing
        self.logits: list[torch.Tensor] = []

    def _routed(self, x: torch.Tensor) -> torch.Tensor:
        logits = x @ self.choose
        self.tell(logits)
        if torch._C._current_graph_task_id() == -1:
            self.logits.append(logits.detach())
        return x * logits.softmax(-1).amax(-1, keepdim=True)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.wte(ids)
        for block in self.blocks:
            x = x + block(x)
        x = checkpoint(self._routed, x, use_reentrant=False) if self.checkpointing else self._routed(x)
        found: torch.Tensor = self.head(x)
        return found


@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize("how", ["logits", "indices", "probs", "all"])
def test_what_a_script_tells_of_a_router_counts_once(tmp_path: Path, how: str, checkpointing: bool) -> None:
    torch.manual_seed(0)

    def tell(logits: torch.Tensor) -> None:
        indices, probs = logits.topk(2, dim=-1).indices, logits.softmax(-1)
        told: dict[str, dict[str, Any]] = {
            "logits": {"logits": logits},
            "indices": {"indices": indices, "experts": 5},
            "probs": {"probs": probs, "indices": indices},
            "all": {"logits": logits, "indices": indices, "loss": logits.sum() * 0 + 0.97, "dropped": 0.25},
        }
        exporter.router("moe", **told[how])

    model = Hidden(tell, checkpointing)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    exporter = watch(model, optimizer, tmp_path, cadence=1)
    for micro in range(2):
        loss = loss_on(model, ids_of(micro))
        loss.backward()
    optimizer.step()
    exporter.step(loss)
    (record,) = steps(exporter, tmp_path)
    assert len(model.logits) == 2
    logits = torch.cat([one.flatten(0, 1) for one in model.logits])
    want = reference(logits, logits.topk(1 if how == "logits" else 2, dim=-1).indices)
    if how in ("indices", "probs"):
        del want["router_z"]
    if how == "indices":
        del want["router_aux_loss"]
    if how == "all":
        want["router_aux_loss"] = 0.97
        assert record.value("expert_dropped_ratio", "moe") == 0.25
    agree(record, "moe", want)
    assert ("router_z" in record.signals) == ("router_z" in want)
    assert ("router_aux_loss" in record.signals) == ("router_aux_loss" in want)


def test_a_loss_that_a_script_tells_of_a_router_that_was_found_takes_the_place_of_ours(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = Model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    exporter = watch(model, optimizer, tmp_path, cadence=3)
    for step in range(1, 4):
        loss = loss_on(model, ids_of(step))
        exporter.router("layers.0.moe.router", torch.randn(3, 4), loss=torch.tensor(0.5))
        exporter.router("1", loss=0.25)
        loss.backward()
        optimizer.step()
        exporter.step(loss)
    found = steps(exporter, tmp_path)
    assert [record.signals["router_aux_loss"] for record in found] == [{"all": 0.375, "0": 0.5, "1": 0.25}] * 3
    assert "router_z" not in found[1].signals


@pytest.mark.parametrize(
    ("told", "says"),
    [
        ({"indices": torch.zeros(3, 2, dtype=torch.int64)}, "moe: give experts="),
        ({"indices": torch.zeros(3, 2), "experts": 4}, "indices are whole numbers"),
        ({"logits": torch.zeros(3, 4, dtype=torch.int64)}, "logits are floating-point"),
        ({"logits": torch.zeros(3, 4), "probs": torch.zeros(3, 5)}, r"logits are (3, 4) and probs (3, 5)"),
    ],
)
def test_what_cannot_be_meant_is_a_notice_and_no_fault(tmp_path: Path, told: dict[str, Any], says: str) -> None:
    model = Model()
    exporter = watch(model, torch.optim.SGD(model.parameters(), lr=0.1), tmp_path)
    loss_on(model, ids_of(1)).backward()
    exporter.router("moe", **told)
    exporter.close()
    assert any(says in notice for notice in exporter.notices), exporter.notices


def test_a_balance_loss_that_a_script_logs_is_not_mixed_with_ours() -> None:
    told = {"routers.loss": {"0": 2.0}, "routers.dropped": {"0": 0.5}}
    logged = Reading(1, True, {"logged": {"router_aux_loss": 1.5}, **told})
    assert RouterLoad().signals(logged) == {"expert_dropped_ratio": {"all": 0.5, "0": 0.5}}
    assert RouterLoad().signals(Reading(2, True, told))["router_aux_loss"] == {"all": 2.0, "0": 2.0}
