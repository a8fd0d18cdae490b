"""Looking inside a model that is used roughly: traced, counted, called by other threads, with odd things given back."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils.flop_counter import FlopCounterMode

from tests.exporter.gpt import batch, gpt, loss_on
from tests.exporter.runs import lines, steps, watch
from trainwarden.exporter import Exporter
from trainwarden.exporter.hooks.modules import tensor_of
from trainwarden.record import Step


def one(model: nn.Module, optimizer: torch.optim.Optimizer, exporter: Exporter, step: int) -> None:
    optimizer.zero_grad()
    loss = loss_on(model, batch(step))
    loss.backward()
    optimizer.step()
    exporter.step(loss)


def begun(folder: Path, model: nn.Module) -> tuple[torch.optim.Optimizer, Exporter]:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return optimizer, watch(model, optimizer, folder, cadence=1)


def test_a_tracer_and_a_counter_of_operations_do_not_see_what_the_exporter_computes(tmp_path: Path) -> None:
    def counted(model: nn.Module) -> tuple[int, int]:
        with FlopCounterMode(display=False) as counter:
            loss_on(model, batch(2)).backward()
        nodes = make_fx(lambda ids: loss_on(model, ids))(batch(3)).graph.nodes
        return counter.get_total_flops(), len(list(nodes))

    plain, model = gpt(), gpt()
    optimizer, exporter = begun(tmp_path, model)
    one(model, optimizer, exporter, 1)
    assert counted(model) == counted(plain)
    one(model, optimizer, exporter, 2)
    assert "block_rms" in steps(exporter, tmp_path)[-1].signals


def test_threads_that_call_the_model_meanwhile_do_not_end_the_looking(tmp_path: Path) -> None:
    model = gpt()
    optimizer, exporter = begun(tmp_path, model)
    one(model, optimizer, exporter, 1)
    over = threading.Event()

    def evaluate() -> None:
        while not over.is_set():
            loss_on(model, batch(1))

    thread = threading.Thread(target=evaluate)
    thread.start()
    try:
        for step in range(2, 12):
            one(model, optimizer, exporter, step)
    finally:
        over.set()
        thread.join()
    exporter.close()
    sentence = "the model is called on another thread than the one that steps: that is not looked into"
    assert exporter.notices == [sentence]
    found = [line.signals["block_absmax"] for line in lines(tmp_path) if isinstance(line, Step)]
    alone = gpt()
    optimizer, other = begun(tmp_path / "alone", alone)
    for step in range(1, 12):
        one(alone, optimizer, other, step)
    want = [record.signals["block_absmax"] for record in steps(other, tmp_path / "alone")]
    assert found == want


def test_a_thread_that_trains_a_model_whose_exporter_another_made_is_looked_at(tmp_path: Path) -> None:
    model = gpt()
    optimizer, exporter = begun(tmp_path, model)
    thread = threading.Thread(target=lambda: [one(model, optimizer, exporter, step) for step in (1, 2)])
    thread.start()
    thread.join()
    assert all("block_rms" in record.signals for record in steps(exporter, tmp_path))


class Gives(nn.Module):
    """Gives a parameter back."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.weight


def test_no_hook_is_left_on_a_parameter_that_a_module_gives_back(tmp_path: Path) -> None:
    model = gpt().eval()
    model.h[0].mlp = Gives(16)
    optimizer, exporter = begun(tmp_path, model)
    for step in (1, 2, 3):
        one(model, optimizer, exporter, step)
    assert not any(parameter._backward_hooks for parameter in model.parameters())
    assert "block_rms" in steps(exporter, tmp_path)[-1].signals


def test_a_list_that_holds_itself_is_looked_into_and_left(tmp_path: Path) -> None:
    round_: list[Any] = []
    round_.append(round_)
    thread = threading.Thread(target=tensor_of, args=(round_,), daemon=True)
    thread.start()
    thread.join(5)
    assert not thread.is_alive()
    assert tensor_of([(torch.ones(1), 2)]) is not None
