from __future__ import annotations

import copy
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import lr_scheduler

from trainwarden.exporter.loader import watch
from trainwarden.exporter.resume import Resume
from trainwarden.exporter.resume_rate import Rate
from trainwarden.exporter.resume_reset import cannot_reset, reset, warm_up_floor
from trainwarden.plan import Exclusion, Plan, Target

torch.set_num_threads(1)
TARGET = Target(attempt=0, step=10, path="c.pt")


def resume(**fields: Any) -> Resume:
    """A resume with this plan in force."""
    made = Resume(1)
    made.plan = Plan(plan_id="p", run_uid="u", for_attempt=1, target=TARGET, **fields)
    made.target = TARGET
    return made


def model() -> nn.Linear:
    torch.manual_seed(0)
    return nn.Linear(4, 3)


def train(net: nn.Module, optimizer: torch.optim.Optimizer, steps: int = 1, scale: float = 1.0) -> None:
    for step in range(steps):
        torch.manual_seed(step)
        optimizer.zero_grad()
        (net(torch.randn(8, 4)).square().sum() * scale).backward()
        optimizer.step()


def moved(net: nn.Linear, optimizer: torch.optim.Optimizer) -> float:
    before = net.weight.detach().clone()
    train(net, optimizer)
    return float((net.weight.detach() - before).abs().max())


KINDS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "adamw": lambda params: torch.optim.AdamW(params, lr=0.01, weight_decay=0.0),
    "adamw for-loop": lambda params: torch.optim.AdamW(params, lr=0.01, foreach=False),
    "adamw fused": lambda params: torch.optim.AdamW(params, lr=0.01, fused=True),
    "adamw amsgrad": lambda params: torch.optim.AdamW(params, lr=0.01, amsgrad=True),
    "adam capturable": lambda params: torch.optim.Adam(params, lr=torch.tensor(0.01), foreach=False),
    "nadam": lambda params: torch.optim.NAdam(params),
    "radam": lambda params: torch.optim.RAdam(params),
    "sgd": lambda params: torch.optim.SGD(params, lr=0.01, momentum=0.9),
    "rmsprop": lambda params: torch.optim.RMSprop(params),
    "adagrad": lambda params: torch.optim.Adagrad(params, initial_accumulator_value=0.1),
    "adafactor": lambda params: torch.optim.Adafactor(params),
}


@pytest.mark.parametrize("kind", KINDS)
def test_after_a_reset_an_optimizer_trains_as_a_new_one(kind: str) -> None:
    net = model()
    used = KINDS[kind](net.parameters())
    train(net, used, 5)
    twin = copy.deepcopy(net)
    assert cannot_reset(used) is None
    reset(used)
    train(net, used, 3)
    train(twin, KINDS[kind](twin.parameters()), 3)
    assert torch.equal(net.weight, twin.weight)


@pytest.mark.parametrize("keep_step", [True, False])
def test_a_reset_makes_the_first_update_one_learning_rate_and_keeping_the_step_would_make_it_three(
    keep_step: bool,
) -> None:
    net = model()
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-3, weight_decay=0.0)
    train(net, optimizer, 20)
    reset(optimizer)
    if keep_step:
        for parameter in net.parameters():
            optimizer.state[parameter] = {
                "step": torch.tensor(20_000.0),
                "exp_avg": torch.zeros_like(parameter),
                "exp_avg_sq": torch.zeros_like(parameter),
            }
    assert moved(net, optimizer) / 1e-3 == pytest.approx(3.16 if keep_step else 1.0, rel=0.05)


class LoopAdam(torch.optim.Optimizer):
    """An Adam of somebody else's, which fills its state when it is made."""

    def __init__(self, params: Any, *, strange: bool = False, master: bool = False) -> None:
        super().__init__(params, {"lr": 0.1, "step": 0})
        for group in self.param_groups:
            for parameter in group["params"]:
                state = self.state[parameter]
                state["exp_avg"], state["exp_avg_sq"] = torch.zeros_like(parameter), torch.zeros_like(parameter)
                if strange:
                    state["quantised"] = torch.zeros(3)
                if master:
                    state["master_param"] = parameter.detach().double()

    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            group["step"] += 1
            for parameter in group["params"]:
                state = self.state[parameter]
                state["exp_avg"].mul_(0.9).add_(parameter.grad, alpha=0.1)
                state["exp_avg_sq"].mul_(0.999).addcmul_(parameter.grad, parameter.grad, value=0.001)
                if "master_param" in state:
                    state["master_param"].sub_(0.1)


class OwnStep(torch.optim.AdamW):
    def step(self, closure: Any = None) -> None:
        raise AssertionError


def test_an_unknown_optimizer_with_adams_state_is_zeroed_with_its_counter_and_its_master_copy() -> None:
    net = model()
    optimizer = LoopAdam(net.parameters(), master=True)
    train(net, optimizer, 3)
    assert cannot_reset(optimizer) is None
    reset(optimizer)
    assert optimizer.param_groups[0]["step"] == 0
    for parameter, state in optimizer.state.items():
        assert not state["exp_avg"].any()
        assert not state["exp_avg_sq"].any()
        assert torch.equal(state["master_param"], parameter.detach().double())


def test_what_cannot_be_reset_is_reported_and_then_nothing_is() -> None:
    net = model()
    known, unknown = torch.optim.AdamW(net.parameters()), LoopAdam(model().parameters(), strange=True)
    train(net, known, 2)
    made = resume(reset_optimizer=True)
    applied = made.apply([known, unknown], 11)
    assert applied is not None
    assert not applied.reset_optimizer
    assert "LoopAdam is not known" in applied.not_applied["reset_optimizer"]
    assert "quantised" in applied.not_applied["reset_optimizer"]
    assert known.state
    assert "has no state to judge it by" in (cannot_reset(OwnStep(net.parameters())) or "")
    nothing = resume(reset_optimizer=True, lr_factor=0.5).apply([object()], 11)
    assert nothing is not None
    assert nothing.lr_factor == 1.0
    assert set(nothing.not_applied) == {"reset_optimizer", "lr_factor"}
    assert "object is no torch optimizer" in nothing.not_applied["lr_factor"]


def test_wrappers_that_keep_the_optimizer_inside_are_seen_through() -> None:
    class Wrapper:
        def __init__(self, optimizer: Any) -> None:
            self.optimizer = optimizer

    net = model()
    optimizer = torch.optim.AdamW(net.parameters())
    train(net, optimizer)
    applied = resume(reset_optimizer=True).apply([Wrapper(Wrapper(optimizer)), optimizer], 11)
    assert applied is not None
    assert applied.reset_optimizer
    assert applied.not_applied == {}
    assert not optimizer.state


def test_a_reset_has_a_floor_under_its_ramp() -> None:
    net = model()
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-3, betas=(0.95, 0.999))
    assert warm_up_floor([optimizer]) == 20
    assert warm_up_floor([torch.optim.AdamW(net.parameters())]) == 10
    assert warm_up_floor([torch.optim.RMSprop(net.parameters())]) == 0
    made = resume(reset_optimizer=True)
    applied = made.apply(optimizer, 11)
    assert applied is not None
    assert (applied.reset_optimizer, applied.rewarmup_steps) == (True, 20)
    assert "raised from 0 to 20 steps" in made.notices[-1]
    assert made.lr_factor(11) == pytest.approx(1 / 20)
    assert moved(net, optimizer) == pytest.approx(1e-3 / 20, rel=0.05)
    longer = resume(reset_optimizer=True, rewarmup_steps=50).apply(optimizer, 11)
    assert longer is not None
    assert longer.rewarmup_steps == 50


def test_the_multiplier_is_a_ramp_up_to_the_factor() -> None:
    rate = Rate(factor=0.5, warm_up=4, began=10)
    assert [rate.at(step) for step in range(10, 17)] == [0.125, 0.125, 0.25, 0.375, 0.5, 0.5, 0.5]
    assert Rate(factor=0.5).at(1) == 0.5
    assert not Rate(warm_up=1).changes


SCHEDULERS: dict[str, Callable[[Any], Any]] = {
    "lambda": lambda optimizer: lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step)),
    "cosine": lambda optimizer: lr_scheduler.CosineAnnealingLR(optimizer, 20),
    "one cycle": lambda optimizer: lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=30),
}


@pytest.mark.parametrize("rate", [0.01, torch.tensor(0.01)], ids=["float", "tensor"])
@pytest.mark.parametrize("made_first", [True, False], ids=["scheduler first", "hooks first"])
@pytest.mark.parametrize("scheduler", SCHEDULERS)
def test_no_scheduler_sees_the_factor_and_the_optimizer_does(scheduler: str, made_first: bool, rate: Any) -> None:
    def run(with_hooks: bool) -> tuple[list[float], list[float]]:
        net = model()
        given = rate.clone() if isinstance(rate, Tensor) else rate
        optimizer = torch.optim.SGD(net.parameters(), lr=given, foreach=False)
        schedule = SCHEDULERS[scheduler](optimizer) if made_first else None
        if with_hooks:
            resume(lr_factor=0.5, rewarmup_steps=4).apply(optimizer, 11)
        schedule = schedule or SCHEDULERS[scheduler](optimizer)
        seen, moves = [], []
        for _ in range(12):
            for parameter in net.parameters():
                parameter.grad = torch.ones_like(parameter)
            before = net.bias.detach().clone()
            optimizer.step()
            moves.append(float((before - net.bias.detach())[0]))
            schedule.step()
            seen.append(float(optimizer.param_groups[0]["lr"]))
        return seen, moves

    plain, patched = run(False), run(True)
    assert patched[0] == plain[0]
    expected = [move * Rate(0.5, 4, 10).at(11 + number) for number, move in enumerate(plain[1])]
    assert patched[1] == pytest.approx(expected, rel=1e-4)


def test_one_tensor_that_is_the_rate_of_two_groups_is_multiplied_once() -> None:
    rate = torch.tensor(1.0)
    net = model()
    optimizer = torch.optim.SGD([{"params": [net.weight]}, {"params": [net.bias]}], lr=rate, foreach=False)
    for group in optimizer.param_groups:
        group["lr"] = rate
    resume(lr_factor=0.5).apply(optimizer, 11)
    for parameter in net.parameters():
        parameter.grad = torch.ones_like(parameter)
    before = net.bias.detach().clone()
    optimizer.step()
    assert torch.allclose(before - net.bias, torch.full((3,), 0.5))
    assert float(rate) == 1.0


def test_a_step_that_raises_leaves_the_scheduled_rate() -> None:
    net = model()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.4)
    schedule = lr_scheduler.CosineAnnealingLR(optimizer, 10)
    resume(lr_factor=0.5).apply(optimizer, 11)

    def broken() -> float:
        assert optimizer.param_groups[0]["lr"] == 0.2
        raise RuntimeError("out of memory")

    with pytest.raises(RuntimeError, match="out of memory"):
        optimizer.step(broken)
    assert optimizer.param_groups[0]["lr"] == 0.4
    schedule.step()
    assert optimizer.state_dict()["param_groups"][0]["lr"] < 0.4


def test_a_rate_that_somebody_sets_meanwhile_is_theirs() -> None:
    optimizer = torch.optim.SGD(model().parameters(), lr=0.4)
    resume(lr_factor=0.5).apply(optimizer, 11)

    def sets() -> float:
        optimizer.param_groups[0]["lr"] = 0.123
        return 0.0

    optimizer.step(sets)
    assert optimizer.param_groups[0]["lr"] == 0.123


@pytest.mark.parametrize("fused", [True, False])
def test_the_ramp_goes_by_global_steps_also_where_grad_scaler_skips_one(fused: bool) -> None:
    net = model()
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.01, fused=fused)
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    made = resume(rewarmup_steps=10)
    made.apply(optimizer, 11)
    rates: list[float] = []
    optimizer.register_step_pre_hook(lambda *_: rates.append(optimizer.param_groups[0]["lr"]))
    for step in range(11, 16):
        optimizer.zero_grad()
        scaler.scale(net(torch.ones(2, 4)).sum() * (float("inf") if step == 12 else 1.0)).backward()
        scaler.step(optimizer)
        scaler.update()
        assert optimizer.param_groups[0]["lr"] == 0.01
        made.closed(step)
    expected = [0.001, 0.002, 0.003, 0.004, 0.005]
    if not fused:
        expected.remove(0.002)  # torch calls neither step nor hooks
    assert rates == pytest.approx(expected)


def test_hooks_can_be_taken_off_again() -> None:
    net = model()
    optimizer = torch.optim.SGD(net.parameters(), lr=1.0)
    made = resume(lr_factor=0.5)
    made.apply(optimizer, 11)
    made.remove()
    for parameter in net.parameters():
        parameter.grad = torch.ones_like(parameter)
    before = net.bias.detach().clone()
    optimizer.step()
    assert torch.allclose(before - net.bias, torch.ones(3))


def test_a_plan_without_changes_installs_nothing() -> None:
    optimizer = torch.optim.SGD(model().parameters(), lr=1.0)
    before = optimizer.step
    applied = resume().apply(optimizer, 11)
    assert applied is not None
    assert applied.not_applied == {}
    assert optimizer.step == before


def test_what_is_applied_is_reported_once_and_honestly(tmp_path: Path) -> None:
    optimizer = torch.optim.SGD(model().parameters(), lr=1.0)
    exclude = [Exclusion(dataset="d", shard="a", first=0, end=2)]
    made = resume(skip_samples=[(0, 4)], exclude=exclude, lr_factor=0.5)
    loader = watch([torch.zeros(2)])
    loader.refused["exclude"] = "it cannot"
    applied = made.apply([optimizer], 11, loader)
    assert applied is not None
    assert (applied.plan_id, applied.start_step, applied.target) == ("p", 11, TARGET)
    assert (applied.skip_samples, applied.exclude, applied.lr_factor) == ([(0, 4)], [], 0.5)
    assert applied.not_applied == {"exclude": "it cannot"}
    assert made.apply([optimizer], 11, loader) is applied
    alone = resume(skip_samples=[(0, 4)]).apply([optimizer], 11)
    assert alone is not None
    assert "no loader is wrapped" in alone.not_applied["skip_samples"]


def test_a_trainer_that_goes_on_elsewhere_than_at_the_target_is_reported() -> None:
    applied = resume().apply([], 31)
    assert applied is not None
    assert "goes on at step 31" in applied.not_applied["target"]
    made = resume()
    made.target = Target(attempt=0, step=5, path="older.pt")
    fallback = made.apply([], 6)
    assert fallback is not None
    assert "cannot be loaded" in fallback.not_applied["target"]
    assert fallback.target == made.target


def test_an_excluded_host_says_that_it_is_one() -> None:
    applied = resume(exclude_hosts=[socket.gethostname()]).apply([], 11)
    assert applied is not None
    assert socket.gethostname() in applied.not_applied["exclude_hosts"]
