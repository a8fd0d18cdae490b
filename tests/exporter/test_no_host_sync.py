"""The exporter adds no host synchronisation to the training thread.

Shown twice without a GPU: on ``torch.device("meta")``, where reading any value raises (real forward, backward and update, with
the optimizer's state forced onto the device as ``capturable`` has it), and by counting ``_local_scalar_dense`` on a CPU.
``bench/gpu_check.py`` is the proof on a device.
"""

from __future__ import annotations

import importlib
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from tests.cases.registry import case
from tests.exporter.gpt import GPT, batch, gpt, loss_on
from tests.exporter.runs import Block, events, lines, loss_of, make, steps, watch
from trainwarden.record import Step

SYNCS = ("aten._local_scalar_dense", "aten.nonzero", "aten.masked_select", "aten.is_nonzero", "aten.equal")


class Spy(TorchDispatchMode):
    """Counts what reads a value on this thread."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if str(function).startswith(SYNCS):
            self.seen.append(str(function))
        return function(*args, **(kwargs or {}))


@pytest.fixture
def capturable_anywhere(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let torch's optimizers keep their step counters on the meta device, as they do on CUDA."""
    adam = importlib.import_module("torch.optim.adam")
    monkeypatch.setattr(adam, "_get_capturable_supported_devices", lambda supports_xla=True: ["meta"])


@pytest.mark.parametrize("clip", [True, False])
@pytest.mark.parametrize("accumulate", [1, 2])
@pytest.mark.parametrize("foreach", [True, False])
@pytest.mark.parametrize("options", [{}, {"amsgrad": True, "maximize": True}, {"weight_decay": 0.0}])
def test_on_meta_no_value_is_read_with_every_probe_at_every_step(
    tmp_path: Path, capturable_anywhere: None, clip: bool, accumulate: int, foreach: bool, options: dict[str, Any]
) -> None:
    with torch.device("meta"):
        model = Block()
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, capturable=True, foreach=foreach, **options)
        optimizer.param_groups[0]["lr"] = torch.tensor(1e-3)  # its constructor would read it
        exporter = watch(model, optimizer, tmp_path, cadence=1)
        for _ in range(3):
            optimizer.zero_grad()
            for _ in range(accumulate):
                ids = torch.zeros(4, 12, dtype=torch.int64)
                loss = nn.functional.cross_entropy(model(ids).flatten(0, 1), ids.flatten())
                loss.backward()
                exporter.batch(ids, ids)
            if clip:
                torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            exporter.step(loss)
        exporter.checkpoint(3, tmp_path / "checkpoint")
        exporter.event("evaluation", loss=loss)
    found = steps(exporter, tmp_path)  # fails if anything in the exporter raised
    assert [record.step for record in found] == [1, 2, 3]
    assert found[-1].value("loss") is None  # there is no value, and none was made up
    assert found[-1].value("tokens") == 144.0 * accumulate
    assert events(tmp_path, "checkpoint")[0].fields["finite"] is None


@pytest.mark.parametrize("checkpointing", [None, "reentrant", "plain"])
@pytest.mark.parametrize("by_hand", [False, True])
@pytest.mark.parametrize("cadence", [1, 10])
def test_on_meta_no_value_is_read_inside_the_model(
    tmp_path: Path, capturable_anywhere: None, checkpointing: str | None, by_hand: bool, cadence: int
) -> None:
    with torch.device("meta"):
        model = GPT(checkpointing=checkpointing, by_hand=by_hand)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, capturable=True)
        optimizer.param_groups[0]["lr"] = torch.tensor(1e-3)  # its constructor would read it
        exporter = watch(model, optimizer, tmp_path, cadence=cadence)
        for _ in range(3):
            optimizer.zero_grad()
            for _ in range(2):
                ids = torch.zeros(2, 12, dtype=torch.int64)
                loss = nn.functional.cross_entropy(model(ids).flatten(0, 1), ids.flatten())
                loss.backward()
            optimizer.step()
            exporter.step(loss)
    assert [record.step for record in steps(exporter, tmp_path)] == [1, 2, 3]


def test_inside_the_model_not_one_value_more_is_read_than_without_the_exporter(tmp_path: Path) -> None:
    seen = []
    for watched in (False, True):
        model = gpt()
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        exporter = watch(model, optimizer, tmp_path, cadence=2) if watched else None
        with Spy() as spy:
            for step in range(1, 5):
                loss = loss_on(model, batch(step))
                loss.backward()
                optimizer.step()
                if exporter is not None:
                    exporter.step(loss)
        seen.append(spy.seen)
        if exporter is not None:
            assert steps(exporter, tmp_path)[1].value("activation_rms") is not None
    assert seen[0] == seen[1]


def test_on_meta_reading_a_value_would_have_been_noticed(tmp_path: Path, capturable_anywhere: None) -> None:
    with torch.device("meta"), pytest.raises(RuntimeError, match="meta"):
        torch.zeros(()).item()


def syncs_of(optimizer_options: dict[str, Any], scaled: bool, clip: bool, folder: Path | None) -> list[str]:
    """Return what reads a value on the training thread in six steps, with an exporter if a folder is given."""
    model = make()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, **optimizer_options)
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0, enabled=scaled)
    exporter = None if folder is None else watch(model, optimizer, folder, cadence=1)
    with Spy() as spy:
        for step in range(1, 7):
            optimizer.zero_grad()
            loss = loss_of(model, step)
            scaler.scale(loss).backward()
            if clip:
                scaler.unscale_(optimizer)
                torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            scaler.step(optimizer)
            scaler.update()
            if exporter is not None:
                exporter.batch(torch.zeros(2, 3, dtype=torch.int64))
                exporter.step(loss)
    if exporter is not None and folder is not None:
        exporter.checkpoint(6, folder / "checkpoint")
        assert len(steps(exporter, folder)) == 6
    return spy.seen


@case("D09")
@pytest.mark.parametrize("options", [{"fused": True}, {"foreach": True}, {"foreach": False}])
@pytest.mark.parametrize("scaled", [True, False])
@pytest.mark.parametrize("clip", [True, False])
def test_not_one_value_more_is_read_than_without_the_exporter(
    tmp_path: Path, options: dict[str, Any], scaled: bool, clip: bool
) -> None:
    assert syncs_of(options, scaled, clip, tmp_path) == syncs_of(options, scaled, clip, None)


def test_the_spy_sees_a_value_that_is_read() -> None:
    with Spy() as spy:
        torch.ones(()).item()
    assert spy.seen


def test_the_drain_thread_and_not_the_training_thread_turns_values_into_numbers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from trainwarden.exporter import staging

    threads: list[str] = []
    read = staging._HostTransfer.read

    def spied(self: Any) -> Any:
        threads.append(threading.current_thread().name)
        return read(self)

    monkeypatch.setattr(staging._HostTransfer, "read", spied)
    model = make()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    exporter = watch(model, optimizer, tmp_path)
    exporter.step(torch.tensor(1.0))
    assert steps(exporter, tmp_path)
    assert set(threads) == {"trainwarden-drain"}
    assert any(isinstance(line, Step) for line in lines(tmp_path))
