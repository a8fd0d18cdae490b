"""Optimizers of every kind: what is known of each is right, and what cannot be known is absent and costs nothing else.

The reference is the difference of the parameters themselves, and the state that the optimizer holds, in float64.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from transformers.optimization import Adafactor as TransformersAdafactor

from tests.exporter.eight_bit import AdamW8bit
from tests.exporter.runs import Block, by_group, events, loss_of, make, norm64, rms64, steps, watch
from trainwarden.record import Step

Make = Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer]


class Plain(torch.optim.AdamW):
    """A subclass that changes nothing of the update."""


class Cautious(torch.optim.AdamW):
    """A subclass whose own step runs torch's, and takes half of it back."""

    def step(self, closure: Any = None) -> Any:
        held = [parameter.detach().clone() for group in self.param_groups for parameter in group["params"]]
        answer = super().step(closure)
        with torch.no_grad():
            for old, parameter in zip(held, (p for g in self.param_groups for p in g["params"]), strict=True):
                parameter.lerp_(old, 0.5)
        return answer


class Lion(torch.optim.Optimizer):
    """The sign of an average: a first moment and no second."""

    def __init__(self, params: Iterable[nn.Parameter], lr: float) -> None:
        super().__init__(params, {"lr": lr, "betas": (0.9, 0.99)})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for parameter in group["params"]:
                state = self.state[parameter]
                moment = state.setdefault("exp_avg", torch.zeros_like(parameter))
                parameter.add_(moment.lerp(parameter.grad, 0.1).sign(), alpha=-group["lr"])
                moment.lerp_(parameter.grad, 0.01)


class FusedLike(torch.optim.AdamW):
    """The counter by group, as apex and DeepSpeed keep it."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            group["step"] = group.get("step", 0) + 1
            for parameter in group["params"]:
                parameter.add_(parameter.grad, alpha=-group["lr"])


UNKNOWN: dict[str, Make] = {
    "RMSprop": lambda params: torch.optim.RMSprop(params, lr=1e-3),
    "Adagrad": lambda params: torch.optim.Adagrad(params, lr=1e-3),
    "Adadelta": lambda params: torch.optim.Adadelta(params, lr=1.0),
    "NAdam": lambda params: torch.optim.NAdam(params, lr=1e-3),
    "RAdam": lambda params: torch.optim.RAdam(params, lr=1e-3),
    "Adamax": lambda params: torch.optim.Adamax(params, lr=1e-3),
    "ASGD": lambda params: torch.optim.ASGD(params, lr=1e-2),
    "Rprop": lambda params: torch.optim.Rprop(params, lr=1e-3),
    "Adafactor": lambda params: torch.optim.Adafactor(params, lr=1e-2),
    "transformers Adafactor": lambda params: TransformersAdafactor(params, lr=1e-3, relative_step=False, beta1=0.9),
    "AdamW8bit": lambda params: AdamW8bit(params),
    "AdamW8bit with torch's names": lambda params: AdamW8bit(params, named=("exp_avg", "exp_avg_sq")),
    "Lion": lambda params: Lion(params, lr=1e-3),
    "Cautious": lambda params: Cautious(params, lr=1e-3),
    "FusedLike": lambda params: FusedLike(params, lr=1e-3),
}
#: Which of their moments are what they claim.
MOMENTS = {"NAdam": ("exp_avg", "exp_avg_sq"), "RAdam": ("exp_avg", "exp_avg_sq"), "Adamax": ("exp_avg",)}
MOMENTS["Cautious"] = ("exp_avg", "exp_avg_sq")
#: Those that count their own steps.
UNCOUNTED = ("Lion",)


def watched_run(
    model: Block, optimizer: torch.optim.Optimizer, folder: Path, count: int = 3, closure: bool = False
) -> tuple[list[Step], list[dict[str, float]], list[dict[str, float]]]:
    """Train and return records, the RMS of what really changed over that of the parameters after it, and gradient norms."""
    exporter = watch(model, optimizer, folder, cadence=1)
    moved, grads = [], []
    for step in range(1, count + 1):
        old = {parameter: parameter.detach().double().clone() for parameter in model.parameters()}

        def evaluate(step: int = step) -> torch.Tensor:
            optimizer.zero_grad()
            loss = loss_of(model, step)
            loss.backward()
            return loss

        loss = optimizer.step(evaluate) if closure else evaluate()
        grads.append({g: norm64([p.grad for p in those if p.grad is not None]) for g, those in by_group(model).items()})
        if not closure:
            optimizer.step()
        exporter.step(loss)
        moved.append(
            {
                group: rms64([parameter.double() - old[parameter] for parameter in those]) / rms64(list(those))
                for group, those in by_group(model).items()
            }
        )
    return steps(exporter, folder), moved, grads


def check(model: Block, optimizer: torch.optim.Optimizer, record: Step, moved: dict[str, float]) -> None:
    """Compare what is known of any optimizer with float64: the last record with the state as it is now."""
    for group, those in by_group(model).items():
        assert record.value("update_applied_ratio", group) == pytest.approx(moved[group], rel=1e-5), group
        assert record.value("weight_rms", group) == pytest.approx(rms64(list(those)), rel=1e-6), group
    squares = {
        group: (moved[group] * rms64(list(those))) ** 2 * sum(p.numel() for p in those)
        for group, those in by_group(model).items()
    }
    for group, square in squares.items():
        if group != "all":
            share = record.value("update_share", group)
            assert share == pytest.approx(square / squares["all"], rel=1e-4, abs=1e-7), group
    largest = max(square for group, square in squares.items() if group != "all")
    assert record.value("update_share") == pytest.approx(largest / squares["all"], rel=1e-4)


@pytest.mark.parametrize("name", UNKNOWN)
def test_an_optimizer_that_is_not_known_has_what_was_measured_and_says_so_once(tmp_path: Path, name: str) -> None:
    model = make()
    optimizer = UNKNOWN[name](model.parameters())
    records, moved, grads = watched_run(model, optimizer, tmp_path)
    for record, norms in zip(records, grads, strict=True):
        assert record.value("update_ratio") is None
        assert record.signals["grad_norm"] == pytest.approx(norms, rel=1e-6)
        assert record.value("optimizer_step") == (None if name in UNCOUNTED else record.step)
    check(model, optimizer, records[-1], moved[-1])
    said = [event.fields["check"] for event in events(tmp_path, "preflight")]
    assert said.count("intended_update") == 1
    for moment in ("exp_avg", "exp_avg_sq"):
        seen = records[-1].value("moment_rms", moment)
        if moment in MOMENTS.get(name, ()):
            assert seen == pytest.approx(rms64([optimizer.state[p][moment] for p in model.parameters()]), rel=1e-5)
        else:
            assert seen is None, moment


def test_muon_and_an_optimizer_for_the_rest_make_one_record(tmp_path: Path) -> None:
    model = make()
    flat = [parameter for parameter in model.parameters() if parameter.ndim == 2 and parameter.shape[0] == 8]
    others = [parameter for parameter in model.parameters() if all(parameter is not one for one in flat)]
    both: list[torch.optim.Optimizer] = [torch.optim.Muon(flat, lr=1e-2), torch.optim.AdamW(others, lr=1e-3)]
    exporter = watch(model, both, tmp_path, cadence=1)
    for step in (1, 2):
        old = {parameter: parameter.detach().double().clone() for parameter in model.parameters()}
        for optimizer in both:
            optimizer.zero_grad()
        loss = loss_of(model, step)
        loss.backward()
        for optimizer in both:
            optimizer.step()
        exporter.step(loss)
    _, record = steps(exporter, tmp_path)
    groups = by_group(model)
    moved = {group: norm64([p.double() - old[p] for p in those]) ** 2 for group, those in groups.items()}
    assert record.value("update_ratio", "attention") is None or record.value("update_ratio", "embedding")
    for group, those in groups.items():
        ratio = (moved[group] / sum(p.numel() for p in those)) ** 0.5 / rms64(list(those))
        assert record.value("update_applied_ratio", group) == pytest.approx(ratio, rel=1e-4)
        if group != "all":
            assert record.value("update_share", group) == pytest.approx(moved[group] / moved["all"], rel=1e-3)
    assert record.value("optimizer_step") == 2  # Muon has none


def test_a_subclass_that_changes_nothing_is_known_also_where_it_was_the_first_to_be_made(tmp_path: Path) -> None:
    class First(torch.optim.Adam):
        step = torch.optim.Adam.step

    for number, kind in enumerate((Plain, First)):
        model = make()
        records, moved, _ = watched_run(model, kind(model.parameters(), lr=1e-2), tmp_path / str(number))
        assert records[-1].value("update_ratio") == pytest.approx(moved[-1]["all"], rel=1e-4)
        assert events(tmp_path / str(number), "preflight") == []


def test_a_step_that_runs_torchs_own_inside_is_looked_at_once(tmp_path: Path) -> None:
    torch.optim.AdamW([nn.Parameter(torch.zeros(1))])  # torch's own step tells its hooks, too, from here on
    model = make()
    records, moved, grads = watched_run(model, Cautious(model.parameters(), lr=1e-2), tmp_path)
    assert [record.value("grad_norm") for record in records] == pytest.approx(
        [norms["all"] for norms in grads], rel=1e-6
    )
    assert records[-1].value("update_applied_ratio") == pytest.approx(moved[-1]["all"], rel=1e-5)


def test_an_optimizer_that_steps_twice_within_a_record_counts_once_and_it_is_said(tmp_path: Path) -> None:
    model = make()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
    exporter = watch(model, optimizer, tmp_path, cadence=1)
    loss = loss_of(model, 1)
    loss.backward()
    want = norm64([parameter.grad for parameter in model.parameters() if parameter.grad is not None])
    optimizer.step()
    optimizer.step()
    exporter.step(loss)
    exporter.close()
    assert any("more than once" in sentence for sentence in exporter.notices)
    from tests.exporter.runs import lines

    (record,) = [line for line in lines(tmp_path) if isinstance(line, Step)]
    assert record.value("grad_norm") == pytest.approx(want, rel=1e-6)


@pytest.mark.parametrize("kind", ["LBFGS", "AdamW", "SGD"])
def test_with_a_closure_the_applied_update_is_what_the_step_did(tmp_path: Path, kind: str) -> None:
    model = make()
    kinds: dict[str, Make] = {
        "LBFGS": lambda params: torch.optim.LBFGS(params, lr=0.1, max_iter=3),
        "AdamW": lambda params: torch.optim.AdamW(params, lr=1e-2),
        "SGD": lambda params: torch.optim.SGD(params, lr=1e-2, momentum=0.9),
    }
    optimizer = kinds[kind](model.parameters())
    records, moved, _ = watched_run(model, optimizer, tmp_path, closure=True)
    for record, change in zip(records, moved, strict=True):
        assert record.value("update_applied_ratio") == pytest.approx(change["all"], rel=1e-4)
        intended = record.value("update_ratio")
        if kind == "LBFGS":
            assert intended is None
        else:
            assert intended == pytest.approx(change["all"], rel=1e-4)


@pytest.mark.parametrize(
    "options",
    [
        {"lr": 1e-2, "weight_decay": 0.1},
        {"lr": torch.tensor(1e-2), "weight_decay": 0.1, "fused": True},
        {"lr": 1e-2, "amsgrad": True, "foreach": True},
        {"lr": 1e-2, "betas": (torch.tensor(0.9), torch.tensor(0.99)), "foreach": False},
    ],
)
def test_the_share_of_the_update_by_group_is_that_of_its_square(tmp_path: Path, options: dict[str, Any]) -> None:
    model = make()
    optimizer = torch.optim.AdamW(model.parameters(), **options)
    records, moved, _ = watched_run(model, optimizer, tmp_path)
    check(model, optimizer, records[-1], moved[-1])
    assert records[-1].value("update_ratio") == pytest.approx(moved[-1]["all"], rel=1e-4)


def test_a_share_of_nothing_is_absent_and_one_of_what_is_not_finite_is_nan(tmp_path: Path) -> None:
    model = make()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    exporter = watch(model, optimizer, tmp_path / "none", cadence=1)
    loss_of(model, 1).backward()
    optimizer.step()
    exporter.step(1.0)
    (record,) = steps(exporter, tmp_path / "none")
    assert record.value("update_ratio") == 0.0
    assert record.value("update_share") is None
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    exporter = watch(model, optimizer, tmp_path / "nan", cadence=1)
    assert model.attn.weight.grad is not None
    model.attn.weight.grad[0, 0] = float("nan")
    optimizer.step()
    exporter.step(1.0)
    (record,) = steps(exporter, tmp_path / "nan")
    assert str(record.value("update_share")) == "nan"
    assert record.value("weight_rms", "mlp") == pytest.approx(rms64(list(model.mlp.parameters())), rel=1e-6)
