"""grad_norm, grad_zero and clip against float64."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

from tests.exporter.runs import by_group, loss_of, make, norm64, steps, watch


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_grad_norm_by_group_equals_a_float64_norm_of_the_same_gradients(tmp_path: Path, dtype: torch.dtype) -> None:
    model = make(dtype=dtype)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
    exporter = watch(model, optimizer, tmp_path)
    loss = loss_of(model, 1)
    loss.backward()
    want = {
        group: norm64([parameter.grad for parameter in those if parameter.grad is not None])
        for group, those in by_group(model).items()
    }
    optimizer.step()
    exporter.step(loss)
    (record,) = steps(exporter, tmp_path)
    assert record.signals["grad_norm"] == pytest.approx(want, rel=3e-7)


def test_grad_norm_before_clipping_in_bf16_is_not_rounded_to_bf16(tmp_path: Path) -> None:
    model = make(dtype=torch.bfloat16)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
    exporter = watch(model, optimizer, tmp_path)
    loss = loss_of(model, 1)
    loss.backward()
    want = norm64([parameter.grad for parameter in model.parameters() if parameter.grad is not None])
    torch.nn.utils.clip_grad_norm_(model.parameters(), 0.01)
    optimizer.step()
    exporter.step(loss)
    (record,) = steps(exporter, tmp_path)
    assert record.value("grad_norm") == pytest.approx(want, rel=3e-7)


def test_grad_norm_leaves_frozen_and_unused_parameters_out_and_lets_an_unfrozen_one_in(tmp_path: Path) -> None:
    model = make()
    model.mlp.requires_grad_(False)
    optimizer = torch.optim.SGD(list(model.parameters()), lr=1e-2)
    exporter = watch(model, optimizer, tmp_path)
    for step in (1, 2):
        if step == 2:
            model.mlp.requires_grad_(True)
        optimizer.zero_grad()
        loss = loss_of(model, step)
        loss.backward()
        optimizer.step()
        exporter.step(loss)
    first, second = steps(exporter, tmp_path)
    assert "mlp" not in first.signals["grad_norm"]  # type: ignore[operator]
    assert second.value("grad_norm", "mlp")


def test_grad_norm_of_a_parameter_that_joined_later_counts_as_other(tmp_path: Path) -> None:
    model = make()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
    exporter = watch(model, optimizer, tmp_path)
    late = nn.Parameter(torch.ones(3))
    optimizer.add_param_group({"params": [late]})
    late.grad = torch.full((3,), 2.0)
    optimizer.step()
    exporter.step(0.0)
    (record,) = steps(exporter, tmp_path)
    assert record.value("grad_norm", "other") == pytest.approx(12**0.5)


def test_a_gradient_whose_squares_would_overflow_fp16_has_its_norm(tmp_path: Path) -> None:
    weight = nn.Parameter(torch.zeros(4, dtype=torch.float16))
    model = nn.ParameterList([weight])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    exporter = watch(model, optimizer, tmp_path)
    weight.grad = torch.full((4,), 3e4, dtype=torch.float16)
    optimizer.step()
    exporter.step(0.0)
    (record,) = steps(exporter, tmp_path)
    assert record.value("grad_norm") == pytest.approx(2 * float(torch.tensor(3e4, dtype=torch.float16)))


def test_a_sparse_gradient_is_absent_and_stops_nothing(tmp_path: Path) -> None:
    model = nn.Embedding(10, 4, sparse=True)
    optimizer = torch.optim.SparseAdam(model.parameters(), lr=0.1)
    exporter = watch(model, optimizer, tmp_path, cadence=1)
    model(torch.tensor([1, 2])).sum().backward()
    optimizer.step()
    exporter.step(1.0)
    (record,) = steps(exporter, tmp_path)
    assert record.value("grad_norm") is None
    assert record.value("loss") == 1.0


def test_grad_zero_ratio_counts_exact_zeros(tmp_path: Path) -> None:
    model = make()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
    exporter = watch(model, optimizer, tmp_path, cadence=1)
    loss = loss_of(model, 1)
    loss.backward()
    want = {}
    for group, those in by_group(model).items():
        flat = torch.cat([parameter.grad.flatten() for parameter in those if parameter.grad is not None])
        want[group] = float((flat == 0).double().mean())
    optimizer.step()
    exporter.step(loss)
    (record,) = steps(exporter, tmp_path)
    assert want["embedding"] > 0
    assert record.signals["grad_zero_ratio"] == pytest.approx(want, rel=1e-12, abs=1e-12)


def test_clip_ratio_is_the_trainers_norm_over_its_threshold(tmp_path: Path) -> None:
    model = make()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
    exporter = watch(model, optimizer, tmp_path)
    totals = []
    for step, threshold in ((1, 0.5), (2, 5.0)):
        optimizer.zero_grad()
        loss = loss_of(model, step)
        loss.backward()
        totals.append(float(torch.nn.utils.clip_grad_norm_(model.parameters(), threshold)))
        optimizer.step()
        exporter.step(loss)
    first, second = steps(exporter, tmp_path)
    assert first.value("clip_ratio") == pytest.approx(totals[0] / 0.5, rel=1e-7)
    assert second.value("clip_ratio") == pytest.approx(totals[1] / 5.0, rel=1e-7)
    assert [first.value("clipped_steps"), second.value("clipped_steps")] == [1.0, 0.0]


def test_clip_by_another_norm_has_its_own_ratio_and_the_l2_norm_all_the_same(tmp_path: Path) -> None:
    model = make()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
    exporter = watch(model, optimizer, tmp_path)
    loss = loss_of(model, 1)
    loss.backward()
    gradients = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
    want, largest = norm64(gradients), max(float(gradient.abs().max()) for gradient in gradients)
    torch.nn.utils.clip_grad_norm_(model.parameters(), 0.01, norm_type=float("inf"))
    optimizer.step()
    exporter.step(loss)
    (record,) = steps(exporter, tmp_path)
    assert record.value("grad_norm") == pytest.approx(want, rel=3e-7)
    assert record.value("clip_ratio") == pytest.approx(largest / 0.01, rel=1e-6)
