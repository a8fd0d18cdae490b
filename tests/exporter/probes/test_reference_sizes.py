"""The same probes on models of a size that random ones have not: ten thousand parameters, and one that is larger than a block."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch
from torch import nn

from tests.exporter.runs import lines, norm64, rms64, steps, watch
from trainwarden.exporter.measure import HOST_BLOCK
from trainwarden.exporter.probes.update_applied import SAMPLES
from trainwarden.record import Step


def filled(parameter: nn.Parameter, step: int, power: float) -> torch.Tensor:
    generator = torch.Generator().manual_seed(step)
    return (torch.randn(parameter.shape, generator=generator, dtype=torch.float64) * 10.0**power).to(parameter.dtype)


@pytest.mark.parametrize("kind", ["AdamW", "SGD", "RMSprop"])
def test_ten_thousand_parameters_of_every_type_are_measured_as_one_would_be(tmp_path: Path, kind: str) -> None:
    types = (torch.float32, torch.bfloat16, torch.float64, torch.float32)
    generator = torch.Generator().manual_seed(0)
    model = nn.Module()
    for name, group in (("attn", 4000), ("mlp", 4000), ("norm", 2000)):
        parameters = [
            nn.Parameter(torch.randn((1 + at % 7, 1 + at % 3), generator=generator).to(types[at % 4]))
            for at in range(group)
        ]
        model.add_module(name, nn.ParameterList(parameters))
    groups = {"attention": list(model.attn), "mlp": list(model.mlp), "norm": list(model.norm)}  # type: ignore[arg-type]
    groups["all"] = [parameter for those in list(groups.values()) for parameter in those]
    made = {
        "AdamW": lambda params: torch.optim.AdamW(params, lr=1e-2, weight_decay=0.0),
        "SGD": lambda params: torch.optim.SGD(params, lr=100.0, momentum=0.9, nesterov=True),
        "RMSprop": lambda params: torch.optim.RMSprop(params, lr=1e-2),
    }
    optimizer = made[kind](model.parameters())
    exporter = watch(model, optimizer, tmp_path, cadence=1, preflight=False)
    for number, parameter in enumerate(groups["all"]):
        parameter.grad = filled(parameter, number, -3) if number % 5 else torch.zeros_like(parameter)
    grads = {group: [parameter.grad for parameter in those] for group, those in groups.items()}
    zeros = {group: torch.cat([grad.flatten().double() for grad in found]) == 0 for group, found in grads.items()}  # type: ignore[union-attr]
    old = {parameter: parameter.detach().double().clone() for parameter in groups["all"]}
    optimizer.step()
    exporter.step(1.0)
    (record,) = steps(exporter, tmp_path)
    for group, those in groups.items():
        changes = [parameter.double() - old[parameter] for parameter in those]
        assert record.value("grad_norm", group) == pytest.approx(norm64(grads[group]), rel=1e-9)  # type: ignore[arg-type]
        assert record.value("grad_zero_ratio", group) == pytest.approx(float(zeros[group].double().mean()), abs=1e-12)
        assert record.value("weight_rms", group) == pytest.approx(rms64(list(those)), rel=1e-9)
        applied = rms64(changes) / rms64(list(those))
        assert record.value("update_applied_ratio", group) == pytest.approx(applied, rel=1e-5)
        if kind == "RMSprop":
            assert record.value("update_ratio") is None
        else:  # bf16 rounds what is applied
            assert record.value("update_ratio", group) == pytest.approx(applied, rel=0.05)
        if kind == "AdamW":
            for moment in ("exp_avg", "exp_avg_sq"):
                states = [optimizer.state[parameter][moment] for parameter in those]
                assert record.value("moment_rms", moment, group) == pytest.approx(rms64(states), rel=1e-9)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("power", [-22, 0, 22])
@pytest.mark.parametrize("transposed", [True, False])
def test_a_parameter_of_several_blocks_is_right_however_large_or_small_its_numbers_are(
    tmp_path: Path, dtype: torch.dtype, power: int, transposed: bool
) -> None:
    torch.manual_seed(0)
    weight = (torch.randn(900, 1000, dtype=torch.float64) * 10.0 ** min(power, 0)).to(dtype)
    assert weight.numel() > HOST_BLOCK
    model = nn.ParameterList([nn.Parameter(weight.t() if transposed else weight)])
    optimizer = torch.optim.SGD(model.parameters(), lr=10.0 ** (-2 - max(power, 0)))
    exporter = watch(model, optimizer, tmp_path, cadence=1, preflight=False)
    (parameter,) = model
    for step in range(12):
        parameter.grad = filled(parameter, step, power)
        grad, old = parameter.grad, parameter.detach().double().clone()
        optimizer.step()
        exporter.step(1.0)
    records = steps(exporter, tmp_path)
    last = records[-1]
    assert last.value("grad_norm") == pytest.approx(norm64([grad]), rel=1e-6)
    assert last.value("weight_rms") == pytest.approx(rms64([parameter]), rel=1e-6)
    meant = optimizer.param_groups[0]["lr"] * rms64([grad]) / rms64([parameter])
    assert last.value("update_ratio") == pytest.approx(meant, rel=1e-5)
    sampled = rms64([parameter.double() - old]) / rms64([parameter])
    assert last.value("update_applied_ratio") == pytest.approx(sampled, rel=0.2)  # about a thousand elements of them
    assert {record.value("nonfinite", "grad") for record in records} == {0.0}


def test_of_values_that_jump_out_of_float32s_reach_one_measurement_is_infinite_and_the_next_are_right(
    tmp_path: Path,
) -> None:
    model = nn.ParameterList([nn.Parameter(torch.zeros(100_000))])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    exporter = watch(model, optimizer, tmp_path, preflight=False)
    (parameter,) = model
    wants = []
    for step in range(40):
        parameter.grad = filled(parameter, step, 25 if step >= 20 else 0)
        wants.append(norm64([parameter.grad]))
        optimizer.step()
        exporter.step(1.0)
        while exporter._parts is not None and exporter._parts.drain.lag:  # a real step is longer than this
            pass
    exporter.close()
    found = [line.value("grad_norm") for line in lines(tmp_path) if isinstance(line, Step)]
    assert found[:20] == pytest.approx(wants[:20], rel=1e-6)
    right = [value == pytest.approx(want, rel=1e-6) for value, want in zip(found[20:], wants[20:], strict=True)]
    assert right.count(False) <= 2
    assert all(right[3:])
    assert all(value == math.inf for value, fine in zip(found[20:], right, strict=True) if not fine)


def test_the_samples_of_all_parameters_together_are_bounded() -> None:
    assert SAMPLES * 4 * 3 <= 16 * 2**20  # before, after and their difference, in float32
