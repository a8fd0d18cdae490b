"""loss, learning_rate, loss_scale, nonfinite, samples, step_time, optimizer_step and update_applied, one by one."""

from __future__ import annotations

import math
import time
from pathlib import Path

import pytest
import torch
from torch import nn

from tests.exporter.runs import loss_of, make, rms64, steps, train, watch


def test_loss_is_recorded_as_given_a_tensor_a_float_nothing_or_several_elements(tmp_path: Path) -> None:
    model = make()
    exporter = watch(model, torch.optim.SGD(model.parameters(), lr=0.1), tmp_path)
    exporter.step(torch.tensor(2.5, requires_grad=True) * 2)
    exporter.step(1.25)
    exporter.step()
    exporter.step(torch.tensor([1.0, 2.0]))
    exporter.step(torch.tensor(1 / 3, dtype=torch.float64))
    exporter.step(float("nan"))
    found = [record.value("loss") for record in steps(exporter, tmp_path)]
    assert found[:5] == [5.0, 1.25, None, 1.5, 1 / 3]
    assert found[5] is not None
    assert math.isnan(found[5])


def test_loss_of_the_step_survives_that_its_tensor_is_written_afterwards(tmp_path: Path) -> None:
    model = make()
    exporter = watch(model, torch.optim.SGD(model.parameters(), lr=0.1), tmp_path)
    running = torch.zeros(())
    for step in range(1, 4):
        running.fill_(float(step))
        exporter.step(running)
        running.fill_(-1.0)
    assert [record.value("loss") for record in steps(exporter, tmp_path)] == [1.0, 2.0, 3.0]


def test_nonfinite_counts_a_loss_of_nan_and_of_infinity(tmp_path: Path) -> None:
    model = make()
    exporter = watch(model, torch.optim.SGD(model.parameters(), lr=0.1), tmp_path)
    for loss in (1.0, torch.tensor(math.inf), math.nan):
        exporter.step(loss)
    assert [record.value("nonfinite", "loss") for record in steps(exporter, tmp_path)] == [0.0, 1.0, 1.0]


def test_learning_rate_is_the_one_of_the_step_by_group_before_the_scheduler_moves_it(tmp_path: Path) -> None:
    model = make()
    groups = [{"params": model.wte.parameters(), "lr": 0.5}, {"params": model.attn.parameters(), "name": "slow"}]
    optimizer = torch.optim.SGD(groups, lr=0.25)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (step + 1))
    exporter = watch(model, optimizer, tmp_path)
    for step in range(1, 4):
        optimizer.zero_grad()
        loss = loss_of(model, step)
        loss.backward()
        optimizer.step()
        schedule.step()
        exporter.step(loss)
    found = [record.signals["lr"] for record in steps(exporter, tmp_path)]
    assert found[0] == {"all": 0.5, "0": 0.5, "slow": 0.25}
    assert [pytest.approx(rate["all"]) for rate in found] == [0.5, 0.25, 0.5 / 3]  # type: ignore[index]


def test_learning_rate_comes_with_the_actual_beta2(tmp_path: Path) -> None:
    model = make()
    optimizer = torch.optim.AdamW(model.parameters(), betas=(0.9, 0.95))
    exporter = watch(model, optimizer, tmp_path)
    train(model, optimizer, exporter, 1)
    (record,) = steps(exporter, tmp_path)
    assert record.value("beta2") == 0.95


def test_step_time_is_the_time_from_end_to_end(tmp_path: Path) -> None:
    model = make()
    exporter = watch(model, torch.optim.SGD(model.parameters(), lr=0.1), tmp_path)
    exporter.step(1.0)
    time.sleep(0.05)
    exporter.step(1.0)
    first, second = (record.value("step_duration_seconds") for record in steps(exporter, tmp_path))
    assert first is None
    assert second is not None
    assert 0.05 <= second < 0.5


def test_optimizer_step_counts_updates_and_not_steps(tmp_path: Path) -> None:
    model = make()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    before = watch(model, optimizer, tmp_path / "before")
    train(model, optimizer, before, 3)
    before.close()
    exporter = watch(model, optimizer, tmp_path / "after", cadence=1)
    train(model, optimizer, exporter, 2)
    assert [record.value("optimizer_step") for record in steps(exporter, tmp_path / "after")] == [4.0, 5.0]


def test_update_applied_is_the_difference_that_the_step_made(tmp_path: Path) -> None:
    model = nn.Linear(100, 30)  # more elements than are sampled
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    exporter = watch(model, optimizer, tmp_path, cadence=1)
    generator = torch.Generator().manual_seed(0)
    for parameter in model.parameters():
        parameter.grad = torch.randn(parameter.shape, generator=generator)
    old = [parameter.detach().clone() for parameter in model.parameters()]
    optimizer.step()
    exporter.step(1.0)
    (record,) = steps(exporter, tmp_path)
    new = list(model.parameters())
    want = rms64([a - b for a, b in zip(new, old, strict=True)]) / rms64(list(new))
    assert record.value("update_applied_ratio") == pytest.approx(want, rel=0.03)  # a sample of a third of them


def test_samples_come_from_the_wrapped_loader(tmp_path: Path) -> None:
    model = make()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    exporter = watch(model, optimizer, tmp_path)
    rows = [torch.full((5,), row) for row in range(24)]
    loader = exporter.wrap(
        torch.utils.data.DataLoader(rows, batch_size=4),  # type: ignore[arg-type]
        shards=[("first", 0, 12), ("second", 12, 24)],
        reserve=0,
        dataset="rows",
    )
    for _ in range(2):
        for _ in loader:
            exporter.step(1.0)
    records = steps(exporter, tmp_path)
    assert [record.samples for record in records[:3]] == [[(0, 4)], [(4, 8)], [(8, 12)]]
    assert [shard.name for shard in records[3].shards] == ["second"]
    assert [record.value("epoch") for record in records] == [0.0] * 6 + [1.0] * 6
    assert [record.value("sample_position") for record in records[:6]] == [4.0, 8.0, 12.0, 16.0, 20.0, 24.0]
    assert records[-1].value("samples_seen") == 48.0
    assert records[-1].value("tokens") == 240.0


def test_of_several_optimizers_one_that_makes_no_step_has_its_rate_all_the_same(tmp_path: Path) -> None:
    model = make()
    often = torch.optim.AdamW(model.mlp.parameters(), lr=1e-2)
    seldom = torch.optim.SGD(model.attn.parameters(), lr=0.5)
    exporter = watch(model, [often, seldom], tmp_path)
    for step in range(1, 5):
        loss = loss_of(model, step)
        loss.backward()
        often.step()
        if step == 2:
            seldom.step()
        exporter.step(loss)
    for record in steps(exporter, tmp_path):
        assert record.signals["lr"] == {"all": 0.5, "0.0": 1e-2, "1.0": 0.5}
