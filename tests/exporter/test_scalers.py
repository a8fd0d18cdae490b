"""Loss scaling in every form that trainers use it: the scale, what was skipped, and nothing that was still scaled."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import accelerate
import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler

from tests.exporter.runs import Block, by_group, loss_of, make, norm64, steps, watch
from tests.exporter.test_hook_matrix import reference_norms


def halves(model: Block) -> tuple[list[nn.Parameter], list[nn.Parameter]]:
    head = list(model.lm_head.parameters())
    return head, [parameter for parameter in model.parameters() if all(parameter is not one for one in head)]


@pytest.mark.parametrize("fused", [True, False])
def test_of_two_optimizers_under_one_scaler_only_the_one_that_was_skipped_has_no_update(
    tmp_path: Path, fused: bool
) -> None:
    model = make()
    head, rest = halves(model)
    both = [torch.optim.AdamW(head, lr=1e-2, fused=fused), torch.optim.AdamW(rest, lr=1e-2, fused=fused)]
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=100)
    exporter = watch(model, both, tmp_path, cadence=1)
    for step in (1, 2, 3):
        for optimizer in both:
            optimizer.zero_grad()
        loss = loss_of(model, step)
        scaler.scale(loss).backward()
        if step == 2:
            assert head[0].grad is not None
            head[0].grad[0, 0] = math.inf
        for optimizer in both:
            scaler.step(optimizer)
        scaler.update()
        exporter.step(loss)
    first, second, third = steps(exporter, tmp_path)
    assert [record.value("skipped") for record in (first, second, third)] == [0.0, 1.0, 0.0]
    assert [record.value("loss_scale") for record in (first, second, third)] == [1024.0, 1024.0, 512.0]
    assert [record.value("loss_scale_backoffs") for record in (first, second, third)] == [0.0, 1.0, 0.0]
    assert second.value("grad_norm") is None
    assert (second.value("update_ratio", "mlp") or 0) > 0
    assert second.value("update_applied_ratio", "mlp") == pytest.approx(second.value("update_ratio", "mlp"), rel=1e-3)
    assert second.value("update_ratio", "head") == (0.0 if fused else None)
    assert second.value("update_applied_ratio", "head") == (0.0 if fused else None)
    assert third.value("update_ratio", "head")


def test_two_scalers_are_told_apart_and_the_smaller_scale_is_recorded(tmp_path: Path) -> None:
    model = make()
    head, rest = halves(model)
    both = [torch.optim.SGD(head, lr=1e-2), torch.optim.SGD(rest, lr=1e-2)]
    scalers = [torch.amp.GradScaler("cpu", init_scale=scale) for scale in (4096.0, 64.0)]
    exporter = watch(model, both, tmp_path)
    for step in range(1, 6):
        for optimizer in both:
            optimizer.zero_grad()
        loss = loss_of(model, step)
        loss.backward()
        pairs = list(zip(scalers, both, strict=True))
        for scaler, optimizer in pairs if step % 2 else pairs[::-1]:
            scaler.scale(torch.ones(()))
            for group in optimizer.param_groups:
                for parameter in group["params"]:
                    assert parameter.grad is not None
                    parameter.grad.mul_(scaler.get_scale() * (math.inf if step == 3 and scaler is scalers[0] else 1.0))
            scaler.step(optimizer)
            scaler.update()
        exporter.step(loss)
    records = steps(exporter, tmp_path)
    assert [record.value("loss_scale") for record in records] == [64.0] * 5
    assert sum(record.value("loss_scale_backoffs") or 0.0 for record in records) == 1.0


@pytest.mark.parametrize("order", ["unscale then clip", "clip then unscale", "neither"])
def test_fsdps_own_scaler_is_heard_in_every_order(tmp_path: Path, order: str) -> None:
    store = dist.HashStore()
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    try:
        model = make()
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        scaler = ShardedGradScaler(device="cpu", init_scale=256.0, growth_interval=1000)
        exporter = watch(model, optimizer, tmp_path, cadence=1, side_group=False)
        expected = []
        for step in (1, 2, 3):
            expected.append(reference_norms(model, step)["all"])
            optimizer.zero_grad()
            loss = loss_of(model, step)
            scaler.scale(loss * (math.inf if step == 2 else 1.0)).backward()
            if order == "clip then unscale":
                torch.nn.utils.clip_grad_norm_(model.parameters(), 1e9)
            if order != "neither":
                scaler.unscale_(optimizer)
            if order == "unscale then clip":
                torch.nn.utils.clip_grad_norm_(model.parameters(), 1e9)
            scaler.step(optimizer)
            scaler.update()
            exporter.step(loss)
        records = steps(exporter, tmp_path)
    finally:
        dist.destroy_process_group()
    assert [record.value("skipped") for record in records] == [0.0, 1.0, 0.0]
    assert [record.value("loss_scale") for record in records] == [256.0, 256.0, 128.0]
    for record, norm in zip(records, expected, strict=True):
        if record.step != 2:
            assert record.value("grad_norm") == pytest.approx(norm, rel=1e-5)


def test_accelerates_wrapped_optimizer_under_fp16_is_heard(tmp_path: Path, request: pytest.FixtureRequest) -> None:
    model = make()
    plain = torch.optim.AdamW(model.parameters(), lr=1e-3)
    scaler = torch.amp.GradScaler("cpu", init_scale=128.0)
    accelerate.Accelerator(cpu=True)
    request.addfinalizer(lambda: accelerate.state.AcceleratorState._reset_state(True))
    wrapped = accelerate.optimizer.AcceleratedOptimizer(plain, device_placement=False, scaler=scaler)
    exporter = watch(model, plain, tmp_path, cadence=1)
    expected = []
    for step in (1, 2):
        expected.append(reference_norms(model, step)["all"])
        wrapped.zero_grad()
        loss = loss_of(model, step)
        scaler.scale(loss * (math.inf if step == 2 else 1.0)).backward()
        wrapped.step()
        exporter.step(loss)
    assert wrapped.step_was_skipped
    records = steps(exporter, tmp_path)
    assert [record.value("skipped") for record in records] == [0.0, 1.0]
    assert records[0].value("grad_norm") == pytest.approx(expected[0], rel=1e-5)


def test_a_scaler_that_is_off_or_not_stepped_says_nothing(tmp_path: Path) -> None:
    model = make()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    exporter = watch(model, optimizer, tmp_path)
    scalers: list[Any] = [torch.amp.GradScaler("cpu", enabled=False), torch.amp.GradScaler("cpu", init_scale=4.0)]
    for scaler in scalers:
        optimizer.zero_grad()
        loss = loss_of(model, 1)
        scaler.scale(loss).backward()
        if scaler is scalers[0]:
            scaler.step(optimizer)
            scaler.update()
        exporter.step(loss)  # the second is never stepped: the trainer left the batch out
    records = steps(exporter, tmp_path)
    assert [record.value(name) for record in records for name in ("loss_scale", "skipped")] == [None] * 4
    assert records[1].value("grad_norm") is None


@pytest.mark.parametrize("told", [True, False], ids=["handed-in", "found"])
def test_growth_is_no_backoff(tmp_path: Path, told: bool) -> None:
    model = make()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0, growth_interval=2)
    exporter = watch(model, optimizer, tmp_path, scaler=scaler if told else None)
    for step in range(1, 7):
        optimizer.zero_grad()
        loss = loss_of(model, step)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        exporter.step(loss)
    records = steps(exporter, tmp_path)
    assert [record.value("loss_scale") for record in records] == [8.0, 8.0, 16.0, 16.0, 32.0, 32.0]
    assert [record.value("loss_scale_backoffs") for record in records] == [0.0] * 6


def zero_ratio(folder: Path, scale: float) -> tuple[float, float]:
    """Return the share of zero gradients in fp16 under a loss scale, as recorded and as counted, of a loss that is a millionth."""
    model = make(dtype=torch.float16)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    exporter = watch(model, optimizer, folder, cadence=1)
    loss = loss_of(model, 1).float() * 1e-6
    (loss * scale).backward()
    flat = torch.cat([parameter.grad.flatten() for parameter in model.parameters() if parameter.grad is not None])
    optimizer.step()
    exporter.step(loss)
    (record,) = steps(exporter, folder)
    assert record.signals["grad_norm"] == pytest.approx(
        {g: norm64([p.grad for p in those if p.grad is not None]) for g, those in by_group(model).items()}, rel=1e-9
    )
    return record.value("grad_zero_ratio") or 0.0, float((flat == 0).double().mean())


def test_a_loss_scale_that_is_too_small_shows_in_the_share_of_zeros(tmp_path: Path) -> None:
    small, counted_small = zero_ratio(tmp_path / "small", 1.0)
    enough, counted_enough = zero_ratio(tmp_path / "enough", 65536.0)
    assert small == pytest.approx(counted_small, abs=1e-12)
    assert enough == pytest.approx(counted_enough, abs=1e-12)
    assert small > enough + 0.2
