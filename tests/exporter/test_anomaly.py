"""The close look (exporter/anomaly): which module, which operation, which line made the first value that is not finite."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from tests.exporter.gpt import batch, gpt, loss_on
from tests.exporter.planted import (
    Divided,
    Faulty,
    InfinityTimesNothing,
    LogOfNegative,
    Masked,
    MaskedByModule,
    Overflowing,
    RootAtZero,
    forget_compiled,
    line_of,
    planted,
)
from tests.exporter.runs import events, lines, steps, watch
from trainwarden.record import Event, Step


@pytest.fixture(autouse=True)
def nothing_is_compiled() -> None:
    forget_compiled()


def looked(
    folder: Path,
    model: nn.Module,
    count: int = 5,
    *,
    each: Callable[[int], None] = lambda step: None,
    loss_of: Callable[[int], torch.Tensor] | None = None,
    accumulate: int = 1,
    first: int = 2,
    last: int = 4,
    **settings: Any,
) -> list[Event]:
    """Train without moving and look closely at the steps from ``first`` to ``last``; return the events ``anomaly``."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    exporter = watch(model, optimizer, folder, **{"anomaly": (first, last - first + 1), **settings})
    state = {name: value.clone() for name, value in model.state_dict().items()}
    for step in range(1, count + 1):
        optimizer.zero_grad()
        each(step)
        for part in range(accumulate):
            loss = loss_on(model, batch(10 * step + part)) if loss_of is None else loss_of(step)
            loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        model.load_state_dict(state)  # 0 times NaN is NaN
        exporter.step(loss.detach())
    steps(exporter, folder)
    assert not torch.is_anomaly_enabled()
    return events(folder, "anomaly")


def found(told: list[Event]) -> Event:
    """Return the one event that something was found."""
    (one,) = [event for event in told if event.fields["state"] == "found"]
    return one


def switched(fault: Any, at: int) -> Callable[[int], None]:
    def each(step: int) -> None:
        fault.on = step == at

    return each


def rows(folder: Path) -> list[dict[str, Any]]:
    (file,) = folder.rglob("anomaly.jsonl")
    return [json.loads(line) for line in file.read_text().splitlines()]


FORWARD = [(LogOfNegative, "forward", "log")]
BACKWARD = [(RootAtZero, "backward", "SqrtBackward0"), (InfinityTimesNothing, "backward", "ExpBackward0")]


@pytest.mark.parametrize(("kind", "stage", "op"), [*FORWARD, *BACKWARD])
@pytest.mark.parametrize("options", [{}, {"checkpointing": "plain"}, {"checkpointing": "reentrant"}, {"tied": True}])
def test_module_operation_and_line_of_a_planted_fault_are_named(
    tmp_path: Path, kind: type[Faulty], stage: str, op: str, options: dict[str, Any]
) -> None:
    model, fault = planted(kind, **options)
    event = found(looked(tmp_path, model, each=switched(fault, 3)))
    assert event.step == 3
    fields = event.fields
    assert (fields["module"], fields["stage"], fields["op"]) == ("h.1.mlp.1", stage, op)
    assert (fields["group"], fields["block"]) == ("mlp", 1)
    assert fields["at"] == line_of(kind)
    assert fields["traceback"][-1].startswith(f"{line_of(kind)} in fault: ")
    assert "# here" in fields["traceback"][-1]
    # Reentrant checkpointing makes the nodes in the backward pass: they were called from there.
    again = options.get("checkpointing") == "reentrant" and stage == "backward"
    assert any(("in looked" if again else "in loss_on") in line for line in fields["traceback"])


def test_scores_that_leave_the_range_of_float16_are_named_and_not_the_softmax_behind_them(tmp_path: Path) -> None:
    model = gpt(dtype=torch.float16)
    attention = Overflowing(16).half()
    layer: Any = model.h[2]
    layer.attn = attention
    event = found(looked(tmp_path, model, each=switched(attention, 3)))
    fields = event.fields
    assert (fields["module"], fields["stage"], fields["op"]) == ("h.2.attn", "forward", "matmul")
    assert fields["at"] == line_of(Overflowing)  # type: ignore[arg-type]
    assert fields["group"] == "attention"


@pytest.mark.parametrize("kind", [Masked, MaskedByModule, Divided])
def test_infinities_that_a_later_operation_takes_away_are_no_finding(tmp_path: Path, kind: type[Faulty]) -> None:
    model, fault = planted(kind)
    told = looked(tmp_path, model, each=switched(fault, 3))
    assert [event.fields["state"] for event in told] == ["begun", "ended"]
    assert told[-1].fields["nonfinite"] == 0


def test_a_module_that_gives_a_mask_is_not_taken_for_the_one_behind_it_whose_output_is_really_wrong(
    tmp_path: Path,
) -> None:
    model, mask = planted(MaskedByModule)
    mask.on = True
    layer: Any = model.h[2]
    layer.mlp[1] = LogOfNegative(layer.mlp[1])
    fields = found(looked(tmp_path, model, each=switched(layer.mlp[1], 3))).fields
    assert (fields["module"], fields["op"], fields["at"]) == ("h.2.mlp.1", "log", line_of(LogOfNegative))


def test_a_loss_that_is_not_finite_over_finite_modules_is_the_loss_with_its_line(tmp_path: Path) -> None:
    model = gpt()

    def loss_of(step: int) -> torch.Tensor:
        loss = loss_on(model, batch(step))
        return loss if step != 3 else loss + torch.log(loss * 0.0 - 1.0).detach() + loss

    fields = found(looked(tmp_path, model, loss_of=loss_of)).fields
    assert (fields["module"], fields["stage"], fields["op"]) == ("loss", "loss", "AddBackward0")
    assert Path(fields["at"].rpartition(":")[0]).name == "test_anomaly.py"


def test_what_the_model_was_given_comes_first(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 1))

    def loss_of(step: int) -> torch.Tensor:
        x = torch.ones(3, 4)
        x[1, 2] = math.nan if step == 3 else 1.0
        found: torch.Tensor = model(x).sum()
        return found

    fields = found(looked(tmp_path, model, loss_of=loss_of)).fields
    assert (fields["module"], fields["stage"]) == ("the model", "input")


def test_of_several_micro_batches_the_one_is_named(tmp_path: Path) -> None:
    model, fault = planted(LogOfNegative)
    passes = [0]

    def each(step: int) -> None:
        passes[0] = 0

    def loss_of(step: int) -> torch.Tensor:
        fault.on = step == 3 and passes[0] == 2
        passes[0] += 1
        return loss_on(model, batch(step))

    event = found(looked(tmp_path, model, each=each, loss_of=loss_of, accumulate=3))
    assert event.fields["micro_batch"] == 2
    elements = {row["elements"] for row in rows(tmp_path) if row["what"] == "output" and row["name"] == "h.1"}
    assert elements == {3 * 2 * 12 * 16}


def test_a_gradient_that_only_overflows_when_it_is_added_up_is_of_the_accumulation(tmp_path: Path) -> None:
    model = nn.Linear(2, 1, bias=False).half()
    x = torch.full((1, 2), 40_000.0, dtype=torch.float16)

    def loss_of(step: int) -> torch.Tensor:
        found: torch.Tensor = (
            model(x * (1.0 if step == 3 else 0.1)) * 0.0 + model.weight.sum() * 40_000.0 * (step == 3)
        ).sum()
        return found

    fields = found(looked(tmp_path, model, loss_of=loss_of, accumulate=2)).fields
    assert (fields["stage"], fields["parameter"]) == ("accumulation", "weight")


def test_an_update_that_makes_parameters_of_finite_gradients_infinite_is_named_and_then_the_parameter(
    tmp_path: Path,
) -> None:
    model = gpt()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    exporter = watch(model, optimizer, tmp_path, anomaly=(1, 4))
    for step in range(1, 4):
        optimizer.zero_grad()
        loss = loss_on(model, batch(step))
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.param_groups[0]["lr"] = math.inf if step == 2 else 1e-3
        optimizer.step()
        exporter.step(loss.detach())
    steps(exporter, tmp_path)
    first, second = [event for event in events(tmp_path, "anomaly") if event.fields["state"] == "found"]
    assert (first.step, first.fields["stage"], first.fields["parameter"]) == (2, "update", "wte.weight")
    assert (second.step, second.fields["stage"], second.fields["module"]) == (3, "forward", "wte")
    assert second.fields["parameter"] == "wte.weight"


def test_what_a_scaler_skips_is_said_to_be_scaled(tmp_path: Path) -> None:
    model, fault = planted(RootAtZero)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    exporter = watch(model, optimizer, tmp_path, scaler=scaler, anomaly=(2, 2))
    for step in range(1, 5):
        optimizer.zero_grad()
        fault.on = step == 3
        loss = loss_on(model, batch(step))
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        exporter.step(loss.detach())
    told = steps(exporter, tmp_path)
    assert [line.value("skipped") for line in told] == [0.0, 0.0, 1.0, 0.0]
    event = found(events(tmp_path, "anomaly"))
    assert (event.fields["op"], event.fields["module"], event.fields["scaled"]) == ("SqrtBackward0", "h.1.mlp.1", True)
    assert any(row["what"] == "gradient" and row["finite"] < 1 for row in rows(tmp_path))


def test_the_lines_say_of_each_module_and_parameter_what_a_float64_reference_says(tmp_path: Path) -> None:
    model = gpt()
    seen: dict[str, torch.Tensor] = {}
    model.h[1].register_forward_hook(lambda module, args, output: seen.update(output=output.detach().double()))
    model.h[1].register_forward_hook(
        lambda module, args, output: (
            output.register_hook(lambda gradient: seen.update(gradient=gradient.double())) and None
        )
    )
    looked(tmp_path, model, count=3, first=2, last=2, each=lambda step: seen.clear() if step == 2 else None)
    kept = {(row["what"], row["name"]): row for row in rows(tmp_path) if row["what"] != "step"}
    # What the hooks saw last is of step 3; make step 2 again.
    seen.clear()
    loss_on(model, batch(20)).backward()  # type: ignore[no-untyped-call]
    for what, reference in (("output", seen["output"]), ("output_gradient", seen["gradient"])):
        row = kept[what, "h.1"]
        assert (row["elements"], row["finite"]) == (reference.numel(), 1.0)
        want = (reference.min(), reference.max(), reference.mean(), reference.std(correction=0))
        for name, value in zip(("min", "max", "mean", "std"), want, strict=True):
            assert row[name] == pytest.approx(float(value), rel=1e-6, abs=1e-12), (what, name)
    names = {name for name, _ in model.named_parameters()}
    for what in ("before", "gradient", "parameter"):
        assert {name for kind, name in kept if kind == what} == names
    leaves = {name for name, module in model.named_modules() if name and not isinstance(module, nn.ModuleList)}
    assert {name for kind, name in kept if kind == "output"} == {*leaves, "the model"}


def test_the_share_of_finite_elements_is_told_and_the_rest_is_of_those(tmp_path: Path) -> None:
    model = gpt()

    def spoil(module: nn.Module, args: Any, output: torch.Tensor) -> torch.Tensor:
        spoilt = output.clone()
        spoilt.view(-1)[:6] = torch.tensor([math.nan, math.inf, -math.inf, math.nan, math.nan, math.nan])
        return spoilt

    handle: list[Any] = []

    def each(step: int) -> None:
        if step == 3:
            handle.append(model.h[0].register_forward_hook(spoil, prepend=True))
        elif handle:
            handle.pop().remove()

    looked(tmp_path, model, each=each, first=3, last=3)
    (row,) = [row for row in rows(tmp_path) if (row["what"], row.get("name")) == ("output", "h.0")]
    assert row["finite"] == pytest.approx(1 - 6 / row["elements"])
    assert all(math.isfinite(row[name]) for name in ("min", "max", "mean", "std"))
    assert rows(tmp_path)[0]["finite"] < 1  # what is not finite stands first


def test_the_events_stand_around_the_records_of_their_steps(tmp_path: Path) -> None:
    model, fault = planted(LogOfNegative)
    begun, told, ended = looked(tmp_path, model, each=switched(fault, 3))
    assert (begun.fields["state"], begun.step, begun.fields["asked_by"], begun.fields["steps"]) == (
        "begun",
        1,
        "setting",
        3,
    )
    assert ended.fields["state"] == "ended"
    assert (ended.fields["first_step"], ended.fields["last_step"]) == (2, 4)
    assert (ended.fields["looked"], ended.fields["nonfinite"], ended.fields["absent"]) == (3, 1, [])
    assert (tmp_path / "run" / ended.fields["file"]).is_file()
    assert ended.fields["lines"] == sum(row["what"] != "step" for row in rows(tmp_path))
    order = [line for line in lines(tmp_path) if isinstance(line, Step | Event)]
    at = next(n for n, line in enumerate(order) if isinstance(line, Event) and line.fields.get("state") == "found")
    record = next(line for line in order[at:] if isinstance(line, Step))
    assert record.step == told.step == 3
