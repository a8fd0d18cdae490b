"""Every probe of parameters, gradients and optimizer state against float64, on random models.

A model is a handful of parameters of random shape (a scalar, none at all, a row, a matrix), type, layout and group, with gradients
that are dense, transposed, strided, sparse, partly zero, tiny, huge, not finite or missing, beside buffers of whole numbers. The
exporter is a real one and the records are read from its journal. Tolerances: what is only summed is right to 1e-9 in any type, for
squares of small tensors are summed in float64; norms that the trainer took are its own, in its types; an intended update is worked
out in float32, to 1e-5 where decay and moment nearly cancel, and what decayed is told from the parameter after the update, which bf16
rounds to 0.4 % and fp16 to 0.05 %.
"""

from __future__ import annotations

import math
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from tests.exporter.runs import lines, watch
from trainwarden.record import Step

GROUPS = {
    "embed": "embedding",
    "attn": "attention",
    "mlp": "mlp",
    "norm": "norm",
    "lm_head": "head",
    "thing": "other",
}
SHAPES = [(), (0,), (1,), (5,), (0, 3), (4, 6), (16, 9), (2, 3, 4), (31, 33)]
#: Powers of ten that values of a type are about. Their squares neither overflow nor vanish in float64.
RANGES = {torch.float16: (-6, 3), torch.bfloat16: (-30, 30), torch.float32: (-36, 30), torch.float64: (-60, 60)}
KINDS = ["dense", "dense", "dense", "transposed", "strided", "zeros", "none", "nan", "inf"]
MOMENTS = ("exp_avg", "exp_avg_sq")


@dataclass
class Part:
    """One parameter and how its gradient comes."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    layout: str
    power: int
    kind: str


def values(seed: int, part: Part, power: float) -> Tensor:
    """Return random numbers of about 10**power that the type can hold."""
    drawn = np.random.default_rng(seed).standard_normal(part.shape) * 10.0**power
    return torch.from_numpy(np.asarray(drawn)).to(part.dtype)


def laid_out(tensor: Tensor, layout: str) -> Tensor:
    """Return the same numbers, lying otherwise in memory."""
    if layout == "transposed" and tensor.ndim > 1:
        return tensor.transpose(0, -1).contiguous().transpose(0, -1)
    if layout == "strided" and tensor.ndim:
        return torch.stack([tensor, torch.full_like(tensor, 7.0)], dim=-1)[..., 0]
    return tensor


def gradient(seed: int, part: Part, power: float, kind: str) -> Tensor | None:
    if kind == "none":
        return None
    found = values(seed, part, power)
    if found.numel() and kind in ("nan", "inf"):
        found.view(-1)[0] = float(kind)
    if kind == "zeros":
        found = found * (torch.arange(found.numel()).view(found.shape) % 3 == 0)
    return laid_out(found, kind)


class Made(nn.Module):
    def __init__(self, parts: list[Part], seed: int) -> None:
        super().__init__()
        self.of: list[tuple[str, nn.Parameter]] = []
        for number, part in enumerate(parts):
            block, leaf = nn.Module(), nn.Module()
            power = min(part.power, 2)
            leaf.weight = nn.Parameter(laid_out(values(seed + number, part, power), part.layout))
            leaf.register_buffer("seen", torch.arange(3))
            block.add_module(part.name, leaf)
            self.add_module(f"b{number}", block)
            self.of.append((GROUPS[part.name], leaf.weight))


@st.composite
def parts(draw: st.DrawFn) -> Part:
    dtype = draw(st.sampled_from(list(RANGES)))
    return Part(
        draw(st.sampled_from(list(GROUPS))),
        draw(st.sampled_from(SHAPES)),
        dtype,
        draw(st.sampled_from(["plain", "transposed", "strided"])),
        draw(st.integers(*RANGES[dtype]) | st.integers(-4, 1)),
        draw(st.sampled_from(KINDS)),
    )


OPTIMIZERS: dict[str, tuple[type[torch.optim.Optimizer], dict[str, Any]]] = {
    "adamw": (torch.optim.AdamW, {"weight_decay": 0.1}),
    "adam": (torch.optim.Adam, {"amsgrad": True, "foreach": False}),
    "adam maximize": (torch.optim.Adam, {"maximize": True, "weight_decay": 0.01}),
    "sgd": (torch.optim.SGD, {}),
    "sgd nesterov": (torch.optim.SGD, {"momentum": 0.9, "nesterov": True, "weight_decay": 0.1}),
    "sgd heavy ball": (torch.optim.SGD, {"momentum": 0.9, "dampening": 0.2, "maximize": True}),
    "rmsprop": (torch.optim.RMSprop, {}),
}


def intended(
    optimizer: torch.optim.Optimizer, group: dict[str, Any], parameter: Tensor, old: Tensor, grad: Tensor
) -> Tensor:
    """Return the update that the formulas of torch.optim make of the state, in float64. ``old`` is the parameter before it."""
    state, rate, decay = optimizer.state[parameter], float(group["lr"]), group["weight_decay"]
    if isinstance(optimizer, torch.optim.Adam):
        count = float(state["step"])
        beta1, beta2 = group["betas"]
        second = state["max_exp_avg_sq" if group["amsgrad"] else "exp_avg_sq"].double()
        divisor = (second / (1 - beta2**count)).sqrt() + group["eps"]
        size = rate / (1 - beta1**count) * state["exp_avg"].double() / divisor
        sign = -1.0 if group["maximize"] else 1.0
        return sign * size + (rate * decay * old if isinstance(optimizer, torch.optim.AdamW) else 0.0)
    direction = (-grad if group["maximize"] else grad) + decay * old
    if group["momentum"]:
        buffer = state["momentum_buffer"].double()
        direction = direction + group["momentum"] * buffer if group["nesterov"] else buffer
    return rate * direction


def sums(pairs: list[tuple[str, Tensor]]) -> dict[str, float]:
    """Return the sum of squares by group, and of all."""
    found: dict[str, float] = {"all": 0.0} if pairs else {}
    for group, tensor in pairs:
        square = float(tensor.detach().double().square().sum())
        found["all"] += square
        found[group] = found.get(group, 0.0) + square
    return found


def counts(pairs: list[tuple[str, Tensor]]) -> dict[str, int]:
    found: dict[str, int] = {"all": 0} if pairs else {}
    for group, tensor in pairs:
        found["all"] += tensor.numel()
        found[group] = found.get(group, 0) + tensor.numel()
    return found


def means(pairs: list[tuple[str, Tensor]]) -> dict[str, float]:
    squares, sizes = sums(pairs), counts(pairs)
    return {group: math.sqrt(squares[group] / sizes[group]) for group in squares}


def same(seen: Any, want: dict[str, float], rel: float, what: str, floor: float = 0.0) -> None:
    """Demand the same groups and values; NaN equals NaN."""
    got = {} if seen is None else seen if isinstance(seen, dict) else {"all": seen}
    assert set(got) == set(want), (what, got, want)
    for group, value in want.items():
        assert got[group] == pytest.approx(value, rel=rel, abs=floor, nan_ok=True), (what, group, got[group], value)


def finite(pairs: list[tuple[str, Tensor]]) -> float:
    return 0.0 if all(bool(torch.isfinite(tensor).all()) for _, tensor in pairs) else 1.0


def ratio(above: dict[str, float], below: dict[str, float]) -> dict[str, float]:
    return {group: above[group] / below[group] for group in above if below[group] != 0}


@given(
    made=st.lists(parts(), min_size=1, max_size=6),
    which=st.sampled_from(list(OPTIMIZERS)),
    threshold=st.none() | st.sampled_from([1e-3, 1.0, 1e6]),
    seed=st.integers(0, 2**20),
    loss=st.floats(width=32) | st.just(2),
    rate=st.sampled_from([0.0, 1e-4, 1e-2]),
    tensor_rate=st.booleans(),
)
@settings(
    max_examples=80, deadline=None, suppress_health_check=list(HealthCheck), phases=[Phase.explicit, Phase.generate]
)
def test_every_probe_equals_float64_on_random_models(
    made: list[Part], which: str, threshold: float | None, seed: int, loss: float, rate: float, tensor_rate: bool
) -> None:
    model = Made(made, seed)
    kind, options = OPTIMIZERS[which]
    own_rate = torch.tensor(rate, dtype=torch.float64) if tensor_rate and "foreach" in options else rate
    half = [model.of[0][1]], [parameter for _, parameter in model.of[1:]]
    optimizer = kind(
        [{"params": one, "name": name} for name, one in zip("ab", half, strict=True) if one], lr=own_rate, **options
    )
    folder = Path(tempfile.mkdtemp())
    exporter = watch(model, optimizer, folder, cadence=1, preflight=False)
    wants = []
    for step in range(2):
        for number, (part, (_, parameter)) in enumerate(zip(made, model.of, strict=True)):
            grad = gradient(seed + 100 * step + number, part, part.power, part.kind)
            parameter.grad = None if grad is None else grad
        live = [(group, parameter) for group, parameter in model.of if parameter.grad is not None and parameter.numel()]
        grads = [(group, parameter.grad) for group, parameter in live]
        want: dict[str, Any] = {"grad_norm": {g: math.sqrt(s) for g, s in sums(grads).items()}, "finite": finite(grads)}
        plain = all(grad.dtype in (torch.float32, torch.float64) for _, grad in grads)
        # What decayed is told from the parameter as it was rounded after the update.
        rounding = max(torch.finfo(parameter.dtype).eps for _, parameter in model.of)
        want["rel"] = 1e-5 + (rounding if options.get("weight_decay") else 0.0)
        want["own"] = threshold is None or not plain
        if threshold is not None and any(parameter.grad is not None for _, parameter in model.of):
            total = torch.nn.utils.clip_grad_norm_(model.parameters(), threshold)
            want["clip"] = float(total) / threshold
        zeros = [(group, (grad == 0).double()) for group, grad in grads]
        want["zero"] = {group: square / counts(zeros)[group] for group, square in sums(zeros).items()}
        used = {parameter: parameter.grad.double().clone() for _, parameter in live}
        old = {parameter: parameter.detach().double().clone() for _, parameter in live}
        optimizer.step()
        want["weight"] = means(live)
        moved = [(group, parameter.detach().double() - old[parameter]) for group, parameter in live]
        want["applied"] = ratio(means(moved), want["weight"])
        belongs = {id(parameter): group for group in optimizer.param_groups for parameter in group["params"]}
        if which != "rmsprop":
            meant = [
                (group, intended(optimizer, belongs[id(parameter)], parameter, old[parameter], used[parameter]))
                for group, parameter in live
            ]
            want["update"] = ratio(means(meant), want["weight"])
            squares = sums(meant)
            of_whom = squares
        else:
            of_whom = sums(moved)
        if of_whom.get("all", 0.0) != 0.0:
            part_of = {
                group: square / of_whom["all"] if of_whom["all"] < math.inf else math.nan
                for group, square in of_whom.items()
            }
            del part_of["all"]
            want["share"] = {"all": max(part_of.values(), key=lambda value: (value != value, value)), **part_of}
        want["moments"] = {
            moment: means([(group, optimizer.state[parameter][moment]) for group, parameter in live])
            for moment in MOMENTS
            if which.startswith("adam") and live
        }
        want["state finite"] = all(
            finite([(group, optimizer.state[parameter][moment])]) == 0.0
            for moment in want["moments"]
            for group, parameter in live
        )
        want["count"] = next(
            (float(s["step"]) for s in (optimizer.state.get(p, {}) for _, p in live) if "step" in s), None
        )
        wants.append(want)
        exporter.step(torch.tensor(loss) if seed % 2 else loss)
    exporter.close()
    assert exporter.notices == []
    records = [line for line in lines(folder) if isinstance(line, Step)]
    assert len(records) == 2
    for record, want in zip(records, wants, strict=True):
        compare(record, want, loss, rate)


def compare(record: Step, want: dict[str, Any], loss: float, rate: float) -> None:
    signals = record.signals
    assert record.value("loss") == pytest.approx(float(np.float32(loss)), rel=1e-7, nan_ok=True)
    assert record.value("nonfinite", "loss") == (0.0 if math.isfinite(loss) else 1.0)
    if want["own"]:
        same(signals.get("grad_norm"), want["grad_norm"], 1e-9, "grad_norm")
        if want["grad_norm"]:
            assert record.value("nonfinite", "grad") == want["finite"]
    elif (
        1e-15 < max(want["grad_norm"].values(), default=1.0) < 1e15
    ):  # the trainer's own norms, in the types of its gradients
        same(signals.get("grad_norm"), want["grad_norm"], 1e-5, "grad_norm", 1e-6 * want["grad_norm"].get("all", 0.0))
    clips = {"all": want["clip"]} if "clip" in want else {}
    same(signals.get("clip_ratio"), clips, 1e-6, "clip_ratio")
    same(signals.get("grad_zero_ratio"), want["zero"], 1e-9, "grad_zero_ratio", 1e-12)
    same(signals.get("weight_rms"), want["weight"], 1e-9, "weight_rms")
    same(signals.get("update_applied_ratio"), want["applied"], 1e-5, "update_applied_ratio")
    rates = signals.get("lr")
    assert (max(rates.values()) if isinstance(rates, dict) else rates) == pytest.approx(rate, rel=1e-7)
    if "update" not in want:
        assert "update_ratio" not in signals
    elif all(map(math.isfinite, want["weight"].values())):  # what decayed cannot be told from a parameter that is gone
        same(signals.get("update_ratio"), want["update"], want["rel"], "update_ratio")
        same(signals.get("update_share"), want.get("share", {}), 10 * want["rel"], "update_share", 1e-6)
    moments: Any = signals.get("moment_rms", {})
    assert set(moments) == set(want["moments"])
    for moment, means_of in want["moments"].items():
        same(moments[moment], means_of, 1e-9, moment)
    if want["moments"]:
        assert record.value("nonfinite", "optimizer") == (0.0 if want["state finite"] else 1.0)
    assert record.value("optimizer_step") == want["count"]
