"""No test of the exporter may leave anything of it in torch for the next one."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from trainwarden.exporter.hooks import attention, clipping, scaler


@pytest.fixture(autouse=True)
def _torch_is_left_as_it_was() -> Iterator[None]:
    yield
    assert not list(clipping._listeners)
    assert not list(scaler._listeners)
    assert not clipping._replaced
    assert not attention._replaced
