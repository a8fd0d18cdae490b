"""No test sees another's: Accelerate keeps its state in the class and in the environment, a process that is followed in torch."""

from __future__ import annotations

import gc
import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from tests.exporter.adapters.followed import Begin, finish
from trainwarden.exporter.hooks import backward
from trainwarden.exporter.unmodified.attach import Attachment
from trainwarden.exporter.unmodified.options import Options


def forget_accelerate() -> None:
    """Let the next Accelerator of this process be its first."""
    for name in [name for name in os.environ if name.startswith("ACCELERATE_")]:
        del os.environ[name]
    state = sys.modules.get("accelerate.state")
    if state is not None:
        state.AcceleratorState._reset_state(reset_partial_state=True)
        state.GradientState._reset_state()


@pytest.fixture(autouse=True)
def _accelerate_begins_anew() -> Iterator[None]:
    forget_accelerate()
    yield
    forget_accelerate()


@pytest.fixture
def begin(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Begin]:
    """Give a function that has this process followed as a fresh one below ``trainwarden exec`` is."""
    monkeypatch.setenv("TRAINWARDEN_DIR", str(tmp_path))
    monkeypatch.setenv("TRAINWARDEN_EXEC_ATTACHED", "")
    monkeypatch.delenv("TRAINWARDEN_EXEC_ATTACHED")
    gc.collect()
    begun: list[Attachment] = []

    def start() -> Attachment:
        begun.append(Attachment(Options(port=0, cadence=1)))
        begun[-1].listen()
        return begun[-1]

    yield start
    for attachment in begun:
        finish(attachment)
    assert not list(backward._listeners)
    assert torch.autograd.backward.__module__ == "torch.autograd"
