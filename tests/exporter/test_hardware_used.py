"""Which GPU a rank uses: read off parameters that say they lie on one. No GPU is needed for that."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from trainwarden.exporter.hardware import Used, used_by

UUID = "4f3b2c1d-0000-1111-2222-333344445555"


def on(*places: str) -> list[Any]:
    return [SimpleNamespace(device=torch.device(place)) for place in places]


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    def have(**properties: Any) -> None:
        monkeypatch.setattr(torch.version, "cuda", "13.0")
        monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
        monkeypatch.setattr(
            torch.cuda, "get_device_properties", lambda device: SimpleNamespace(index=device.index, **properties)
        )

    return have


def test_the_device_is_the_one_that_most_parameters_lie_on(cuda: Callable[..., None]) -> None:
    cuda()
    asked: list[torch.device] = []
    torch.cuda.get_device_properties = lambda device: asked.append(device) or SimpleNamespace(uuid=UUID)  # type: ignore
    assert used_by(on("cpu", "cuda:1", "cuda:3", "cuda:3")) == Used(UUID)
    assert asked == [torch.device("cuda:3")]


def test_a_device_is_named_by_uuid_and_place(cuda: Callable[..., None]) -> None:
    cuda(uuid=UUID, pci_domain_id=0, pci_bus_id=0x1B, pci_device_id=0)
    assert used_by(on("cuda:0")) == Used(UUID, "00000000:1b:00.0")


def test_without_cuda_there_is_none(cuda: Callable[..., None], monkeypatch: pytest.MonkeyPatch) -> None:
    cuda(uuid=UUID)
    assert used_by(on("cpu", "meta")) is None
    monkeypatch.setattr(torch.version, "cuda", None)  # ROCm calls its devices cuda, too
    assert used_by(on("cuda:0")) is None
