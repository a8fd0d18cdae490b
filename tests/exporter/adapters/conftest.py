"""Accelerate keeps its state in the class and in the environment, and its trainers leave both behind: no test sees another's."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator

import pytest


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
