"""Rules on what grows inside a model: made-up series by one rule each, and real trainings under a real exporter.

A small GPT that is trained at ten times the rate at which it learns, without a norm on its queries and keys, is what arXiv 2309.14322 shows:
its attention logits grow and it learns nothing. The same model at a rate at which it learns, and that of the benchmark, are silent.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from bench.gpt import GPT as BenchGPT
from tests.exporter.gpt import gpt
from tests.exporter.runs import steps, watch
from tests.rules.test_default_pack import PACK, fired, stream
from trainwarden.record import Step

INSIDE = {alert for alert, rule in PACK.rules.items() if rule.group == "inside"}


def copies(step: int, rows: int = 8, half: int = 12, vocabulary: int = 31) -> torch.Tensor:
    """Return sequences whose second half repeats the first: attention is what learns them."""
    generator = torch.Generator().manual_seed(7000 + step)
    one = torch.randint(0, vocabulary, (rows, half), generator=generator)
    return torch.cat([one, one], dim=1)


def trained(folder: Path, model: nn.Module, rate: float, count: int, of: Callable[[int], torch.Tensor]) -> list[Step]:
    optimizer = torch.optim.AdamW(model.parameters(), lr=rate, betas=(0.9, 0.95), weight_decay=0.0)
    exporter = watch(model, optimizer, folder, cadence=5, preflight=False)
    for step in range(1, count + 1):
        for group in optimizer.param_groups:
            group["lr"] = rate * min(1.0, step / 20)
        ids = of(step)
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(ids[:, :-1]).flatten(0, 1), ids[:, 1:].flatten())
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        exporter.step(loss)
    return steps(exporter, folder)


def test_attention_logits_that_grow_at_a_rate_far_too_high_are_seen(tmp_path: Path) -> None:
    found = fired(trained(tmp_path, gpt(layers=2, width=32, length=24), 0.1, 260, copies))
    growth, runaway = found["TrainingAttentionLogitGrowth"], found["TrainingAttentionLogitRunaway"]
    assert growth[0] <= 200
    assert growth[0] < runaway[0] <= 260


def test_a_model_that_learns_is_silent(tmp_path: Path) -> None:
    found = fired(trained(tmp_path, gpt(layers=2, width=32, length=24), 1e-2, 300, copies))
    assert found.keys() & INSIDE == set()


def test_the_benchmarks_model_is_silent(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = BenchGPT(layers=2, width=64, vocabulary=64, length=24)
    found = fired(trained(tmp_path, model, 1e-3, 250, lambda step: copies(step, vocabulary=64)))
    assert found.keys() & INSIDE == set()


def inside(seed: int, length: int, **changes: Callable[[int], Any]) -> list[Step]:
    """Return a healthy training whose costly signals come every tenth step; ``changes`` replace some of them.

    Massive activations come up early and stay (arXiv 2402.17762, 2508.03616), logits and the residual stream grow while the loss
    falls, and all are noisy.
    """
    chance = np.random.default_rng(seed)

    def noisy(value: float) -> float:
        return value * math.exp(0.1 * float(chance.standard_normal()))

    def change(step: int, signals: dict[str, Any]) -> None:
        if "loss" in changes:
            signals["loss"] = changes["loss"](step)
        if step % 10 and step > 1:
            return
        rise = 1 - math.exp(-step / 150)
        signals["attention_logit"] = {"lse": noisy(4 + 60 * rise), "sampled": noisy(1 + 50 * rise)}
        signals["activation_absmax"] = {"all": noisy(5 + 4000 * rise), "head": noisy(4 + 40 * rise)}
        signals["residual_rms"] = noisy(1 + 20 * rise)
        signals["block_rms"] = {"0": noisy(1.0), "1": noisy(1 + 20 * rise)}
        signals["grad_row_max"] = {"token": noisy(0.2)}
        for name, value in changes.items():
            signals[name] = value(step)

    def falling(step: int, signals: dict[str, Any]) -> None:
        signals["loss"] -= 0.3 * math.log1p(step / 100)
        change(step, signals)

    return stream(seed, length, falling)


@pytest.mark.parametrize("seed", range(3))
def test_a_healthy_run_with_massive_activations_is_silent(seed: int) -> None:
    assert fired(inside(seed, 3000)).keys() & INSIDE == set()


def grown(first: float, doubles: float, start: int = 1000) -> Callable[[int], float]:
    """Return what is ``first`` until ``start`` and then doubles again and again after so many steps."""
    return lambda step: first * 2 ** (max(0, step - start) / doubles)


FAST = grown(80, 200)
#: Doubles in 3000 steps: nothing that 400 steps would show.
SLOW = grown(80, 3000)


@pytest.mark.parametrize(
    ("expected", "changes", "length"),
    [
        ({"Growth"}, {"lse": FAST, "sampled": lambda step: 50.0}, 1500),
        ({"Growth"}, {"lse": SLOW}, 4500),
        ({"Growth"}, {"sampled": FAST}, 1500),
        ({"Growth"}, {"sampled": SLOW, "bound": lambda step: 500.0}, 4500),
        ({"Growth"}, {"sampled": lambda step: 50.0, "bound": grown(500, 200)}, 1600),
        ({"Growth", "Runaway"}, {"lse": grown(80, 100)}, 1800),
        ({"Growth", "Runaway"}, {"sampled": grown(80, 100)}, 1800),
        # A bound alone is no logit: where the kernel tells more, that counts.
        (set(), {"lse": lambda step: 50.0, "sampled": lambda step: 40.0, "bound": grown(5000, 100)}, 1800),
        # Large ones that stay, and one that only shows up.
        (set(), {"lse": lambda step: 3000.0}, 1800),
        (set(), {"lse": lambda step: 3000.0 if 1000 <= step <= 1050 else 30.0}, 1800),
    ],
)
def test_attention_logits(expected: set[str], changes: dict[str, Callable[[int], float]], length: int) -> None:
    def kinds(step: int) -> dict[str, float]:
        return {kind: value(step) for kind, value in changes.items()}

    found = fired(inside(5, length, attention_logit=kinds))
    assert {name.removeprefix("TrainingAttentionLogit") for name in found.keys() & INSIDE} == expected
    assert all(found[name][1] > 700 for name in found.keys() & INSIDE)


def flat(step: int) -> float:
    """A loss that has learned what there is after some hundred steps."""
    return 2.0 + 2.0 * math.exp(-step / 150) + 0.05 * math.sin(step)


@pytest.mark.parametrize(
    ("expected", "changes"),
    [
        ("TrainingOutputLogitGrowth", {"activation_absmax": lambda step: {"all": 50.0, "head": grown(60, 200)(step)}}),
        ("TrainingActivationGrowth", {"residual_rms": grown(5, 150), "loss": flat}),
        ("TrainingActivationGrowth", {"block_rms": lambda step: {"0": 1.0, "1": grown(5, 150)(step)}, "loss": flat}),
        (
            "TrainingActivationNearOverflow",
            {"activation_absmax": lambda step: {"all": grown(8000, 400)(step)}, "loss_scale": lambda step: 65536.0},
        ),
        ("TrainingEmbeddingRowGrowth", {"grad_row_max": lambda step: {"token": grown(0.2, 100)(step)}, "loss": flat}),
    ],
)
def test_what_grows_is_seen_after_it_began(expected: str, changes: dict[str, Callable[[int], Any]]) -> None:
    found = fired(inside(6, 1900, **changes))
    assert found.keys() & INSIDE == {expected}
    assert found[expected][1] > 1000


@pytest.mark.parametrize(
    "changes",
    [
        # Without a loss scale numbers are not float16: nothing overflows.
        {"activation_absmax": lambda step: {"all": grown(8000, 400)(step)}},
        # The residual stream grows and the loss falls: it learns.
        {"residual_rms": grown(5, 150), "loss": lambda step: 3.0 - step / 1500},
        # A row that is large and holds a small part of the whole.
        {"grad_row_max": lambda step: {"token": 0.001 * grown(0.2, 100)(step)}, "loss": flat},
        # One that went up by a half and stays.
        {"residual_rms": lambda step: 7.5 if step > 1000 else 5.0, "loss": flat},
    ],
)
def test_what_is_no_drift_is_silent(changes: dict[str, Callable[[int], Any]]) -> None:
    assert fired(inside(7, 1900, **changes)).keys() & INSIDE == set()
