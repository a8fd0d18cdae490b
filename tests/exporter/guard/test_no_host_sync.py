"""The guard reads no value: shown on the meta device, where reading one raises, and by counting on a CPU."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from tests.exporter.runs import Block, loss_of, make, steps, watch
from tests.exporter.seams import Watch
from tests.exporter.test_no_host_sync import Spy
from trainwarden.exporter.guard import Guard

BOUNDS: list[dict[str, Any]] = [{}, {"limit": 1.0, "factor": 2.0, "window": 4, "patience": 2}]


@pytest.fixture
def capturable_anywhere(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let torch's optimizers keep their step counters on the meta device, as they do on CUDA."""
    adam = importlib.import_module("torch.optim.adam")
    monkeypatch.setattr(adam, "_get_capturable_supported_devices", lambda supports_xla=True: ["meta"])


@pytest.mark.parametrize("bounds", BOUNDS, ids=["nonfinite", "all"])
@pytest.mark.parametrize("clip", [True, False])
@pytest.mark.parametrize("kind", ["adamw", "sgd"])
@pytest.mark.parametrize("amsgrad", [True, False])
def test_on_meta_no_value_is_read(
    tmp_path: Path, capturable_anywhere: None, bounds: dict[str, Any], clip: bool, kind: str, amsgrad: bool
) -> None:
    with torch.device("meta"):
        model = Block()
        if kind == "adamw":
            optimizer: torch.optim.Optimizer = torch.optim.AdamW(
                model.parameters(), lr=1e-3, capturable=True, amsgrad=amsgrad
            )
            optimizer.param_groups[0]["lr"] = torch.tensor(1e-3)  # its constructor would read it
        else:
            optimizer = torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9, nesterov=amsgrad)
        exporter = watch(model, optimizer, tmp_path, cadence=1)
        Guard(exporter, **bounds).shrink_embeddings()
        for _ in range(4):
            optimizer.zero_grad()
            ids = torch.zeros(4, 12, dtype=torch.int64)
            loss = nn.functional.cross_entropy(model(ids).flatten(0, 1), ids.flatten())
            loss.backward()
            if clip:
                nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            exporter.step(loss)
    exporter.close()
    assert ["copies" in said for said in exporter.notices] == [True]  # and no fault


def syncs(options: dict[str, Any], scaled: bool, clip: bool, folder: Path | None, bounds: dict[str, Any]) -> list[str]:
    """Return what reads a value on the training thread in eight steps, with a guard if a folder is given."""
    model = make()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, **options)
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0, enabled=scaled)
    exporter = None
    if folder is not None:
        exporter = watch(model, optimizer, folder, cadence=1)
        Guard(exporter, **bounds).shrink_embeddings()
    with Spy() as spy:
        for step in range(1, 9):
            optimizer.zero_grad()
            loss = loss_of(model, step) * (float("inf") if step == 5 else 1.0)
            scaler.scale(loss).backward()
            if clip:
                scaler.unscale_(optimizer)
                nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            scaler.step(optimizer)
            scaler.update()
            if exporter is not None:
                exporter.step(loss)
    if exporter is not None:
        exporter.close()
        assert [said for said in exporter.notices if "copies" not in said] == []
    return spy.seen


@pytest.mark.parametrize("bounds", BOUNDS, ids=["nonfinite", "all"])
@pytest.mark.parametrize("options", [{"fused": True}, {"foreach": True}, {"foreach": False}], ids=str)
@pytest.mark.parametrize("scaled", [True, False])
@pytest.mark.parametrize("clip", [True, False])
def test_not_one_value_more_is_read_than_without_the_guard(
    tmp_path: Path, options: dict[str, Any], scaled: bool, clip: bool, bounds: dict[str, Any]
) -> None:
    # The loop of torch's Adam reads its step counter at each update that is made: as many as without.
    assert syncs(options, scaled, clip, tmp_path, bounds) == syncs(options, scaled, clip, None, bounds)


def test_no_guarded_step_waits_for_anything(tmp_path: Path) -> None:
    with Watch() as watching:
        model = make()
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        exporter = watch(model, optimizer, tmp_path, cadence=2)
        Guard(exporter, limit=50.0, factor=5.0, window=4)
        for step in range(1, 16):
            if step == 4:
                watching.caught.clear()
            optimizer.zero_grad()
            loss = loss_of(model, step) * (float("nan") if step == 10 else 1.0)
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 0.5)
            optimizer.step()
            exporter.step(loss)
        found = list(watching.caught)
    exporter.close()
    assert found == []


def test_a_value_that_the_guard_read_would_have_been_noticed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from trainwarden.exporter.guard import verdict

    judge = verdict.Verdicts.judge

    def reading(self: Any, norm: torch.Tensor, *rest: Any) -> Any:
        bool(norm > 0)
        return judge(self, norm, *rest)

    bare = syncs({"fused": True}, False, True, None, {})
    monkeypatch.setattr(verdict.Verdicts, "judge", reading)
    assert syncs({"fused": True}, False, True, tmp_path, {}) != bare


def test_records_of_guarded_steps_are_whole(tmp_path: Path) -> None:
    model = make()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True)
    exporter = watch(model, optimizer, tmp_path)
    Guard(exporter)
    for step in range(1, 4):
        optimizer.zero_grad()
        loss_of(model, step).backward()
        optimizer.step()
        exporter.step()
    assert [record.value("guard_skipped_steps", "nonfinite") for record in steps(exporter, tmp_path)] == [0, 0, 0]
