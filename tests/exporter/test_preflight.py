"""Settings that are wrong are said once each, as soon as they can be known; those that are right are not mentioned."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from tests.exporter.runs import Block, events, loss_of, make, watch
from trainwarden.exporter import Exporter
from trainwarden.exporter.preflight import LOOKS


class Rows(torch.utils.data.Dataset[torch.Tensor]):
    def __len__(self) -> int:
        return 4000

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.full((3,), index % 7)


def found(folder: Path) -> dict[str, tuple[int | None, str]]:
    """Return what was said: step and sentence by check. Each check speaks at most once."""
    said = events(folder, "preflight")
    checks = [event.fields["check"] for event in said]
    assert len(checks) == len(set(checks))
    return {event.fields["check"]: (event.step, event.fields["says"]) for event in said}


def sound(
    folder: Path,
    count: int,
    *,
    options: dict[str, Any] | None = None,
    each: Callable[[Exporter, int], None] = lambda exporter, step: None,
    rate: Callable[[int], float] | None = None,
    resumed: int = 0,
    **settings: Any,
) -> dict[str, tuple[int | None, str]]:
    """Train with everything as it should be, but for what is given, and return what was said."""
    model = make()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, **{"betas": (0.9, 0.95), **(options or {})})
    schedule = None if rate is None else torch.optim.lr_scheduler.LambdaLR(optimizer, rate)
    exporter = watch(model, optimizer, folder, **settings)
    loader = iter(exporter.wrap(torch.utils.data.DataLoader(Rows(), batch_size=2)))
    if resumed:
        exporter.resumed(resumed)
    for step in range(resumed + 1, resumed + count + 1):
        next(loader)
        optimizer.zero_grad()
        loss = loss_of(model, step)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        if schedule is not None:
            schedule.step()
        exporter.step(loss)
        each(exporter, step)
    exporter.close()
    assert exporter.notices == []
    return found(folder)


def test_nothing_is_said_of_settings_that_are_right(tmp_path: Path) -> None:
    def save(exporter: Exporter, step: int) -> None:
        if step % 100 == 0:
            exporter.checkpoint(step, tmp_path / f"{step}.pt")

    assert sound(tmp_path, 250, each=save, rate=lambda step: min(1.0, (step + 1) / 40), total_steps=4000) == {}


def test_a_run_without_clipping_and_positions_is_told_of_both_after_ten_steps(tmp_path: Path) -> None:
    model = make()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    exporter = watch(model, optimizer, tmp_path)
    for step in range(1, 2 * LOOKS):
        optimizer.zero_grad()
        loss = loss_of(model, step)
        loss.backward()
        optimizer.step()
        exporter.step(loss)
    exporter.close()
    said = found(tmp_path)
    assert set(said) == {"clipping", "sample_positions"}
    assert {step for step, _ in said.values()} == {LOOKS}


def half(folder: Path, autocast: bool, scaled: bool, count: int = LOOKS) -> dict[str, tuple[int | None, str]]:
    model = make(dtype=torch.float32 if autocast else torch.float16)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    exporter = watch(model, optimizer, folder)
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0, enabled=scaled)  # made after the exporter
    for step in range(1, count + 1):
        optimizer.zero_grad()
        with torch.autocast("cpu", torch.float16, enabled=autocast):
            loss = loss_of(model, step)
        scaler.scale(loss).backward()
        if autocast:
            scaler.step(optimizer)
            scaler.update()
        else:
            optimizer.step()
        exporter.step(loss)
    exporter.close()
    return found(folder)


@pytest.mark.parametrize("autocast", [True, False])
def test_fp16_without_a_scaler_is_said(tmp_path: Path, autocast: bool) -> None:
    step, says = half(tmp_path, autocast, scaled=False)["loss_scaling"]
    assert step == LOOKS
    assert says.startswith("The forward pass is" if autocast else "8 parameters are")


def test_fp16_with_a_scaler_that_was_made_later_and_bf16_are_not(tmp_path: Path) -> None:
    assert "loss_scaling" not in half(tmp_path, autocast=True, scaled=True)
    with torch.autocast("cpu", torch.bfloat16):
        assert "loss_scaling" not in sound(tmp_path / "bf16", LOOKS)


def test_torch_is_as_it_was_and_an_autocast_inside_a_compiled_region_is_not_disturbed(tmp_path: Path) -> None:
    torch._dynamo.reset()
    before = torch.autocast.__enter__
    model = make()
    exporter = watch(model, torch.optim.SGD(model.parameters(), lr=1e-3), tmp_path)
    assert torch.autocast.__enter__ is not before

    def forward(x: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            answer: torch.Tensor = model.mlp(x)
            return answer

    try:
        compiled = torch.compile(forward, backend="eager", fullgraph=True)
        assert compiled(torch.ones(2, 8)).dtype is torch.bfloat16
    finally:
        exporter.close()
    assert torch.autocast.__enter__ is before


def test_a_run_that_does_not_save_within_the_optimizers_memory_is_told(tmp_path: Path) -> None:
    said = sound(tmp_path, 260, options={"betas": (0.9, 0.996)})
    step, says = said["checkpoint_interval"]
    assert step == 251
    assert "251 steps" in says
    assert "250" in says


def test_checkpoints_that_come_too_seldom_are_told_and_those_of_a_short_memory_are_not(tmp_path: Path) -> None:
    def once(exporter: Exporter, step: int) -> None:
        if step == 100:
            exporter.checkpoint(step, tmp_path / "100.pt")

    assert sound(tmp_path / "long", 360, options={"betas": (0.9, 0.996)}, each=once)["checkpoint_interval"][0] == 351
    assert sound(tmp_path / "short", 290, each=once) == {}  # a memory of 20 steps; nobody saves as often


@pytest.mark.parametrize(
    ("warm", "betas", "told"),
    [
        (None, (0.9, 0.999), 21),  # no warm-up at all
        (5, (0.9, 0.999), 25),
        (11, (0.9, 0.999), None),  # 1 % of 1,000
        (45, (0.9, 0.95), None),  # two memories of 20
    ],
)
def test_a_warm_up_below_one_percent_is_said(
    tmp_path: Path, warm: int | None, betas: tuple[float, float], told: int | None
) -> None:
    def save(exporter: Exporter, step: int) -> None:
        exporter.checkpoint(step, tmp_path / "c.pt")

    rate = (lambda step: 1.0) if warm is None else (lambda step: min(1.0, (step + 1) / warm))
    said = sound(
        tmp_path, 90, options={"betas": betas}, each=save, rate=rate, total_steps=1000 if betas[1] == 0.999 else 10**6
    )
    assert (said["warm_up"][0] if told else set(said)) == (told or set())


def test_a_resumed_run_is_not_asked_for_a_warm_up_but_for_its_optimizers_counter(tmp_path: Path) -> None:
    said = sound(tmp_path, 30, resumed=500, total_steps=100_000)
    assert set(said) == {"optimizer_counter"}
    assert said["optimizer_counter"][0] == 501


def test_parameters_that_no_optimizer_has_are_named(tmp_path: Path) -> None:
    model = make()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    model.lm_head = nn.Linear(8, 31, bias=False)  # replaced after the optimizer was made
    exporter = watch(model, optimizer, tmp_path)
    exporter.step(1.0)
    exporter.close()
    step, says = found(tmp_path)["untrained_parameters"]
    assert step == 0
    assert "lm_head.weight" in says
    assert "has 1 that the model has not" in says


def test_frozen_parameters_in_no_optimizer_are_no_fault(tmp_path: Path) -> None:
    model = make()
    model.wte.requires_grad_(False)
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    exporter = watch(model, torch.optim.AdamW(trained, lr=1e-3), tmp_path)
    exporter.step(1.0)
    exporter.close()
    assert found(tmp_path) == {}


def test_an_epsilon_that_is_zero_in_fp16_and_one_above_the_gradient_are_said(tmp_path: Path) -> None:
    model = make(dtype=torch.float16)
    exporter = watch(model, torch.optim.AdamW(model.parameters(), lr=1e-3), tmp_path / "half")
    exporter.step(1.0)
    exporter.close()
    assert "epsilon" in found(tmp_path / "half")
    assert "epsilon" in sound(tmp_path / "large", LOOKS, options={"eps": 1.0})
    assert "epsilon" not in sound(tmp_path / "usual", LOOKS)


def test_an_optimizer_whose_update_cannot_be_told_is_named(tmp_path: Path) -> None:
    model = make()
    exporter = watch(model, torch.optim.RMSprop(model.parameters(), lr=1e-3), tmp_path)
    exporter.step(1.0)
    exporter.close()
    assert "RMSprop" in found(tmp_path)["intended_update"][1]


def test_the_checks_can_be_turned_off(tmp_path: Path) -> None:
    model = make()
    exporter = watch(model, torch.optim.RMSprop(model.parameters(), lr=1e-3), tmp_path, preflight=False)
    exporter.step(1.0)
    exporter.close()
    assert found(tmp_path) == {}


@pytest.mark.parametrize("value", ["many", 1.5, True])
def test_a_number_of_steps_that_is_none_is_refused(tmp_path: Path, value: Any) -> None:
    model = Block()
    with pytest.raises(TypeError, match="total_steps"):
        watch(model, torch.optim.SGD(model.parameters(), lr=0.1), tmp_path, total_steps=value)


def test_what_is_said_stands_in_the_notices_of_a_replay_and_opens_no_incident(tmp_path: Path) -> None:
    half(tmp_path, autocast=True, scaled=False, count=40)
    journal = next(tmp_path.rglob("00001.ndjson"))
    done = subprocess.run(
        [sys.executable, "-m", "trainwarden.rules.cli", "replay", str(journal), "--output", "json"],
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    told = list(_notices(json.loads(done.stdout)))
    checks = [notice["signal"] for notice in told if notice["kind"] == "preflight"]
    assert sorted(checks) == ["clipping", "loss_scaling", "sample_positions"]


def _notices(report: Any) -> Iterator[dict[str, Any]]:
    for run in report:
        yield from run["notices"]
        assert run["incidents"] == []
