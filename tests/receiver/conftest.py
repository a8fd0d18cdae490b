"""Fixtures of the receiver's tests."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.receiver.requested import Receiving
from tests.receiver.supervised import TOY, Supervised


@pytest.fixture
def supervised(tmp_path: Path) -> Iterator[Supervised]:
    found = Supervised(tmp_path / "runs")
    found.run.path.parent.mkdir()
    yield found
    found.end()


@pytest.fixture
def receiving(supervised: Supervised) -> Iterator[Receiving]:
    """A receiver's folder beside a supervised run; the run is not started yet."""
    found = Receiving(supervised.run.path.parent)
    yield found
    found.end()


@pytest.fixture
def running(supervised: Supervised, receiving: Receiving) -> Supervised:
    """Attempt 0 of a toy runs, a checkpoint lies there, a receiver listens."""
    supervised.write_toy(TOY)
    supervised.start()
    receiving.checkpoint()
    receiving.start()
    supervised.wait_for("ready 0")
    return supervised
