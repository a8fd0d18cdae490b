"""Rules on mixtures of experts: made-up series, and a real model whose router is trained to collapse."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.exporter.runs import steps, watch
from tests.exporter.test_routers import Model, ids_of, loss_on
from tests.rules.test_default_pack import PACK, fired, stream
from trainwarden.record import Step

EXPERTS = {alert for alert, rule in PACK.rules.items() if rule.group == "experts"}


def trained(folder: Path, weight: float, count: int) -> list[Step]:
    """Train with ``weight`` times the balance loss; with a negative one, the router is paid for sending all to few."""
    torch.manual_seed(0)
    model = Model(experts=8, top_k=2)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    logits: list[torch.Tensor] = []
    for layer in model.layers:
        layer.get_submodule("moe.router").register_forward_hook(lambda module, args, output: logits.append(output))
    exporter = watch(model, optimizer, folder, cadence=5, preflight=False)
    for step in range(1, count + 1):
        logits.clear()
        loss = loss_on(model, ids_of(step, rows=4))
        even = torch.zeros(())
        for each in logits:
            probs = each.softmax(-1).flatten(0, -2)
            shares = torch.zeros(8).index_add_(
                0, probs.topk(2, dim=-1).indices.flatten(), torch.ones(probs.shape[0] * 2)
            )
            even = even + 8 * (shares / shares.sum() * probs.mean(0)).sum()
        optimizer.zero_grad()
        (loss + weight * even).backward()
        optimizer.step()
        exporter.step(loss)
    return steps(exporter, folder)


def test_a_router_that_collapses_is_seen_with_its_dead_experts(tmp_path: Path) -> None:
    found = fired(trained(tmp_path, -1.0, 480))
    assert {"TrainingDeadExperts", "TrainingRouterCollapse"} <= found.keys()


def test_a_router_that_is_held_even_is_silent(tmp_path: Path) -> None:
    assert fired(trained(tmp_path, 0.1, 300)).keys() & EXPERTS == set()


def mixed(length: int, **changes: Callable[[int], float]) -> list[Step]:
    chance = np.random.default_rng(11)

    def change(step: int, signals: dict[str, Any]) -> None:
        if step % 10 and step > 1:
            return
        usual = {
            "expert_share_max": 1.6 + 1.5 * math.exp(-step / 100),
            "expert_share_min": 0.5,
            "expert_entropy": 0.97 - 0.3 * math.exp(-step / 100),
            "dead_experts": float(step < 150),
            "router_z": 5.0 + 6 * (1 - math.exp(-step / 400)),
            "router_aux_loss": 1.02 + 0.4 * math.exp(-step / 100),
        }
        for name, value in usual.items():
            value = changes[name](step) if name in changes else value
            noise = 1.0 if name == "dead_experts" else math.exp(0.02 * float(chance.standard_normal()))
            signals[name] = {"all": value * noise, "0": value}
        signals["router_aux_loss"] = {"all": max(1.0, signals["router_aux_loss"]["all"])}

    return stream(12, length, change)


def test_a_healthy_mixture_is_silent() -> None:
    assert fired(mixed(3000)).keys() & (EXPERTS | {"TrainingAuxLossBelowFloor"}) == set()


@pytest.mark.parametrize(
    ("rule", "changes"),
    [
        ("TrainingDeadExperts", {"dead_experts": lambda step: float(step > 1000)}),
        ("TrainingRouterCollapse", {"expert_entropy": lambda step: 0.4 if step > 1000 else 0.97}),
        ("TrainingExpertImbalance", {"expert_share_max": lambda step: 3.0 if step > 1000 else 1.6}),
        ("TrainingRouterLogitGrowth", {"router_z": lambda step: 30 * 2 ** (max(0, step - 1000) / 300)}),
    ],
)
def test_each_rule_sees_its_event(rule: str, changes: dict[str, Callable[[int], float]]) -> None:
    found = fired(mixed(1900, **changes))
    assert found.keys() & EXPERTS == {rule}
    assert found[rule][1] > 1000


@pytest.mark.parametrize(
    "changes",
    [
        # None for a while, and one again: rarely chosen and not dead.
        {"dead_experts": lambda step: float(step % 100 < 60)},
        # Large, and it stays so.
        {"router_z": lambda step: 300.0},
        {"expert_share_max": lambda step: 4.0},
    ],
)
def test_what_is_usual_for_a_model_is_silent(changes: dict[str, Callable[[int], float]]) -> None:
    assert fired(mixed(1900, **changes)).keys() & EXPERTS == set()


def test_a_balance_loss_of_the_layers_that_falls_below_its_floor_is_seen() -> None:
    def change(step: int, signals: dict[str, Any]) -> None:
        signals["router_aux_loss"] = {"all": 1.01 if step <= 900 else 0.95, "0": 1.0}

    assert "TrainingAuxLossBelowFloor" in fired(stream(13, 1000, change))
