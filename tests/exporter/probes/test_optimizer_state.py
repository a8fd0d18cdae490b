"""optimizer_state against a float64 twin that torch's own optimizer updates with the same gradients."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.exporter.runs import by_group, loss_of, make, rms64, steps, watch

ADAM: list[dict[str, Any]] = [
    {},
    {"weight_decay": 0.1},
    {"weight_decay": 0.1, "amsgrad": True},
    {"maximize": True, "weight_decay": 0.1},
    {"betas": (0.8, 0.95), "eps": 1e-3},
    {"fused": True, "weight_decay": 0.1},
    {"foreach": True, "weight_decay": 0.1},
    {"foreach": False, "amsgrad": True},
]
SGD: list[dict[str, Any]] = [
    {},
    {"weight_decay": 0.1},
    {"momentum": 0.9},
    {"momentum": 0.9, "dampening": 0.3, "weight_decay": 0.1},
    {"momentum": 0.9, "nesterov": True, "weight_decay": 0.1},
    {"maximize": True, "weight_decay": 0.1},
    {"maximize": True, "momentum": 0.9, "nesterov": True},
    {"fused": True, "momentum": 0.9},
]
CASES = [(torch.optim.Adam, case) for case in ADAM] + [(torch.optim.AdamW, case) for case in ADAM]
CASES += [(torch.optim.SGD, case) for case in SGD]


@pytest.mark.parametrize(("kind", "options"), CASES)
def test_update_ratio_is_right_to_3e_7(tmp_path: Path, kind: type, options: dict[str, Any]) -> None:
    model, twin = make(), make().double()
    optimizer = kind(model.parameters(), lr=1e-2, **options)
    reference = kind(twin.parameters(), lr=1e-2, **{**options, "fused": False, "foreach": False})
    exporter = watch(model, optimizer, tmp_path, cadence=1)
    updates: list[dict[str, float]] = []
    weights: list[dict[str, float]] = []
    moments: list[dict[str, float]] = []
    for step in range(1, 6):
        optimizer.zero_grad()
        loss = loss_of(model, step)
        loss.backward()
        pairs = list(zip(model.parameters(), twin.parameters(), strict=True))
        old = {}
        with torch.no_grad():
            for parameter, double in pairs:
                double.copy_(parameter)  # only the update itself is compared, not where rounding has led before
                assert parameter.grad is not None
                double.grad = parameter.grad.double()
                old[double] = double.clone()
        optimizer.step()
        reference.step()
        exporter.step(loss)
        groups = by_group(twin)
        updates.append({group: rms64([double - old[double] for double in those]) for group, those in groups.items()})
        weights.append({group: rms64(list(those)) for group, those in groups.items()})
        if "exp_avg" in reference.state[pairs[0][1]]:
            moments.append({g: rms64([reference.state[p]["exp_avg_sq"] for p in those]) for g, those in groups.items()})
    records = steps(exporter, tmp_path)
    assert len(records) == 5
    for number, record in enumerate(records):
        for group in updates[number]:
            ratio = updates[number][group] / weights[number][group]
            assert record.value("update_ratio", group) == pytest.approx(ratio, rel=3e-7), (record.step, group)
            assert record.value("weight_rms", group) == pytest.approx(weights[number][group], rel=3e-7)
            if moments:
                seen = record.value("moment_rms", "exp_avg_sq", group)
                assert seen == pytest.approx(moments[number][group], rel=1e-6)


def test_update_ratio_of_a_tensor_rate_is_the_same(tmp_path: Path) -> None:
    ratios = []
    for number, rate in enumerate((1e-2, torch.tensor(1e-2))):
        model = make()
        optimizer = torch.optim.AdamW(model.parameters(), lr=rate, weight_decay=0.1, fused=True)
        exporter = watch(model, optimizer, tmp_path / str(number), cadence=1)
        loss = loss_of(model, 1)
        loss.backward()
        optimizer.step()
        exporter.step(loss)
        (record,) = steps(exporter, tmp_path / str(number))
        assert record.value("lr") == pytest.approx(1e-2)
        ratios.append(record.value("update_ratio"))
    assert ratios[1] == pytest.approx(ratios[0], rel=3e-7)


def test_a_parameter_larger_than_a_block_is_read_in_pieces_and_gives_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("trainwarden.exporter.measure.HOST_BLOCK", 7)
    monkeypatch.setattr("trainwarden.exporter.probes.optimizer_state.HOST_BLOCK", 7)
    test_update_ratio_is_right_to_3e_7(tmp_path, torch.optim.AdamW, {"weight_decay": 0.1, "amsgrad": True})


def test_an_optimizer_of_another_kind_has_no_intended_update_but_an_applied_one(tmp_path: Path) -> None:
    model = make()
    optimizer = torch.optim.RMSprop(model.parameters(), lr=1e-2)
    exporter = watch(model, optimizer, tmp_path, cadence=1)
    loss = loss_of(model, 1)
    loss.backward()
    optimizer.step()
    exporter.step(loss)
    (record,) = steps(exporter, tmp_path)
    assert record.value("update_ratio") is None
    assert record.value("moment_rms", "exp_avg") is None
    applied = record.value("update_applied_ratio")
    assert applied is not None
    assert applied > 0


def test_in_pure_bf16_the_intended_update_is_there_and_the_applied_one_is_zero(tmp_path: Path) -> None:
    model = make(dtype=torch.bfloat16)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(1.0)
    optimizer = torch.optim.AdamW(model.parameters(), lr=4e-4, weight_decay=0.0)
    exporter = watch(model, optimizer, tmp_path, cadence=1)
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    exporter.step()
    (record,) = steps(exporter, tmp_path)
    assert record.value("update_ratio") == pytest.approx(4e-4, rel=1e-2)
    assert record.value("update_applied_ratio") == 0.0


def test_a_non_finite_moment_or_parameter_is_counted(tmp_path: Path) -> None:
    model = make()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    exporter = watch(model, optimizer, tmp_path, cadence=1)
    loss = loss_of(model, 1)
    loss.backward()
    assert model.attn.weight.grad is not None
    model.attn.weight.grad[0, 0] = float("nan")
    optimizer.step()
    exporter.step(loss)
    (record,) = steps(exporter, tmp_path)
    for quantity in ("grad", "param", "optimizer"):
        assert record.value("nonfinite", quantity) == 1.0
    assert record.value("nonfinite", "loss") == 0.0
