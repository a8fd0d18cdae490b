"""``torch.compile`` after the exporter: no graph break, no compiling anew, the same loss and gradients, the blocks seen as ever."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from tests.exporter.gpt import batch, gpt, loss_on
from tests.exporter.runs import events, steps, watch
from trainwarden.exporter.inside import Inside
from trainwarden.exporter.insight import insight
from trainwarden.exporter.sheet import Reading, Sheet
from trainwarden.record import Step


@pytest.fixture(autouse=True)
def _compiled_anew() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def graphs_of(backend: str) -> tuple[Any, list[torch.fx.GraphModule]]:
    """Return a backend that keeps what it is given, and what it was given."""
    seen: list[torch.fx.GraphModule] = []
    inner = torch._dynamo.backends.registry.lookup_backend(backend)

    def keep(graph: torch.fx.GraphModule, inputs: list[torch.Tensor]) -> Any:
        seen.append(graph)
        return inner(graph, inputs)

    return keep, seen


def whole(model: nn.Module, backend: Any) -> nn.Module:
    found: nn.Module = torch.compile(model, backend=backend, fullgraph=True)  # type: ignore[assignment]
    return found


def in_place(model: nn.Module, backend: Any) -> nn.Module:
    model.compile(backend=backend, fullgraph=True)
    return model


def block_by_block(model: nn.Module, backend: Any) -> nn.Module:
    for layer in model.get_submodule("h"):
        layer.compile(backend=backend, fullgraph=True)
    return model


def blocks_replaced(model: nn.Module, backend: Any) -> nn.Module:
    stack = model.get_submodule("h")
    assert isinstance(stack, nn.ModuleList)
    for number, layer in enumerate(stack):
        stack[number] = torch.compile(layer, backend=backend, fullgraph=True)  # type: ignore[assignment]
    return model


Compiled = tuple[list[torch.Tensor], list[Step]]


def run(folder: Path | None, compiled: Callable[[nn.Module], nn.Module], count: int = 4, **options: Any) -> Compiled:
    """Train a few steps with an evaluation in between; return losses and last gradients, and the records."""
    model = gpt(layers=4, width=8, **options)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
    exporter = None if folder is None else watch(model, optimizer, folder, cadence=2)
    running = compiled(model)
    said = []
    for step in range(1, count + 1):
        optimizer.zero_grad()
        for part in range(2):
            loss = loss_on(running, batch(10 * step + part))
            (loss / 2).backward()
        said.append(loss.detach())
        optimizer.step()
        with torch.no_grad():
            loss_on(running, batch(999))
        if exporter is not None:
            exporter.step(loss)
    said += [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
    return said, steps(exporter, folder) if exporter is not None and folder is not None else []


@pytest.mark.parametrize("compiled", [whole, in_place, block_by_block, blocks_replaced])
def test_blocks_are_seen_through_the_graph_as_without_it(tmp_path: Path, compiled: Any) -> None:
    backend, graphs = graphs_of("aot_eager")
    _, want = run(tmp_path / "eager", lambda model: model)
    said, found = run(tmp_path / "compiled", lambda model: compiled(model, backend))
    with_us = len(graphs)
    for record, other in zip(found, want, strict=True):
        for name in ("block_rms", "block_absmax"):
            assert (name in record.signals) == (record.step in (1, 2, 4))
            if name in record.signals:
                assert record.signals[name] == pytest.approx(other.signals[name], rel=1e-5), (record.step, name)
        if record.step != 3:
            assert record.value("activation_rms") == pytest.approx(other.value("activation_rms"), rel=1e-5)
            assert record.value("residual_rms") == pytest.approx(other.value("residual_rms"), rel=1e-5)
        assert record.value("nonfinite", "activation") == 0.0
    torch._dynamo.reset()
    backend, graphs = graphs_of("aot_eager")
    plain, _ = run(None, lambda model: compiled(model, backend))
    without_us = len(graphs)
    assert with_us <= without_us + 1
    for one, other_one in zip(said, plain, strict=True):
        torch.testing.assert_close(one, other_one, rtol=1e-5, atol=1e-6)


def test_blocks_that_are_compiled_one_by_one_share_their_graph(tmp_path: Path) -> None:
    backend, graphs = graphs_of("eager")
    run(tmp_path, lambda model: block_by_block(model, backend))
    assert len(graphs) <= 3  # the first block, the others, and those without gradients


def test_a_graph_without_gradients_holds_nothing_of_the_exporters(tmp_path: Path) -> None:
    backend, graphs = graphs_of("eager")
    run(tmp_path, lambda model: whole(model, backend))
    ours = [sum("observe" in str(node.target) for node in graph.graph.nodes) for graph in graphs]
    assert sorted(ours) == [0, 5]  # four blocks and what enters the last norm


def test_a_block_that_is_not_finite_is_named_from_within_a_graph(tmp_path: Path) -> None:
    model = gpt()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    exporter = watch(model, optimizer, tmp_path, cadence=10, watch_steps=0)
    running = whole(model, "aot_eager")
    for step in range(1, 5):
        with torch.no_grad():
            model.h[1].ln_1.bias[3] = float("nan") if step == 3 else 0.0
        loss = loss_on(running, batch(step))
        exporter.step(loss.detach())
    steps(exporter, tmp_path)
    (event,) = events(tmp_path, "nonfinite")
    assert event.step == 3
    assert event.fields == {"module": "h.1", "stage": "forward", "group": "all", "block": 1}


def test_a_model_that_was_compiled_before_has_no_such_series_and_that_is_said_once(tmp_path: Path) -> None:
    model = gpt()
    running = whole(model, "eager")
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
    exporter = watch(running, optimizer, tmp_path, cadence=1)
    for step in range(1, 3):
        loss = loss_on(running, batch(step))
        loss.backward()
        optimizer.step()
        exporter.step(loss)
    exporter.close()
    (said,) = exporter.notices
    assert "make the exporter before torch.compile" in said
    exporter._notices.said.clear()
    assert not any(module._forward_hooks for module in model.modules())


@pytest.mark.slow
def test_with_the_default_compiler_the_blocks_are_seen_and_gradients_are_close(tmp_path: Path) -> None:
    if shutil.which("g++") is None and shutil.which("clang++") is None:
        pytest.skip("no C++ compiler: inductor cannot compile for a CPU: apt-get install g++")
    found = []
    for compiled in (False, True):
        model = gpt(layers=1, width=8)
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
        exporter = watch(model, optimizer, tmp_path / str(compiled), cadence=1)
        running = whole(model, "inductor") if compiled else model
        for step in range(1, 3):
            optimizer.zero_grad()
            loss = loss_on(running, batch(step))
            loss.backward()
            optimizer.step()
            exporter.step(loss)
        found.append(
            (
                loss.detach(),
                [parameter.grad for parameter in model.parameters()],
                steps(exporter, tmp_path / str(compiled)),
            )
        )
    (loss, gradients, want), (other_loss, other_gradients, seen) = found
    torch.testing.assert_close(other_loss, loss, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(other_gradients, gradients, rtol=1e-4, atol=1e-6)
    for record, other in zip(seen, want, strict=True):
        assert record.signals["block_rms"] == pytest.approx(other.signals["block_rms"], rel=1e-4)
        assert record.signals["block_absmax"] == pytest.approx(other.signals["block_absmax"], rel=1e-4)
        assert record.value("residual_rms") == pytest.approx(other.value("residual_rms"), rel=1e-4)


def test_compiled_blocks_on_several_devices_are_put_down_by_device_and_read_as_one(tmp_path: Path) -> None:
    model = gpt(layers=4, width=8)
    exporter = watch(model, torch.optim.SGD(model.parameters(), lr=1e-2), tmp_path)
    assert exporter._parts is not None
    (inside,) = [one for one in exporter._parts.observer.beside if isinstance(one, Inside)]
    backend, _ = graphs_of("aot_eager")
    loss_on(in_place(model, backend), batch(1))
    seen = {number: row.clone() for number, row in inside._rows.items()}
    assert len(seen) > 2
    moved = sorted(seen)[1]
    inside._rows[moved] = inside._rows[moved].to("meta")
    sheet = Sheet(due=True)
    inside.take(sheet)
    put = [(spots, values) for name, spots, values in sheet.tensors if name == "inside.rows"]
    assert sorted(spot for spots, _ in put for spot in spots) == sorted(seen)
    assert {values.device.type: len(spots) for spots, values in put} == {"cpu": len(seen) - 1, "meta": 1}
    assert not any(row.any() for number, row in inside._rows.items() if number != moved)  # the next step begins anew
    rest = [spot for spot in seen if spot != moved]
    pieces = {
        "one": [(tuple(seen), torch.stack(list(seen.values())))],
        "two": [(tuple(rest), torch.stack([seen[spot] for spot in rest])), ((moved,), seen[moved].unsqueeze(0))],
    }
    read = [
        insight(Reading(1, True, {}, {"inside.rows": [(spots, rows.flatten().numpy()) for spots, rows in each]}))
        for each in pieces.values()
    ]
    assert read[0] == read[1]
    assert len(read[0].outputs) == len(seen)
    exporter.close()
