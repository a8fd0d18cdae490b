"""A binding or a driver that answers with what is no answer: it costs that one quantity, and is said once."""

from __future__ import annotations

import math
import time
from pathlib import Path
from typing import Any

import pytest

from tests.exporter.nvml import Machine
from tests.exporter.test_hardware import Training, library, machine  # noqa: F401
from trainwarden.record import Step

#: Answers that nothing can be made of.
GARBLED: dict[str, Any] = {
    "nothing": None,
    "text": "N/A",
    "less than nothing": -1,
    "no number": math.nan,
    "no end": math.inf,
    "too much": 10**400,
    "a list": [],
}


@pytest.mark.parametrize("what", [*GARBLED, "an exception"])
def test_one_quantity_that_is_garbled_costs_no_other(
    machine: Machine,  # noqa: F811
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    what: str,
) -> None:
    import pynvml

    def answer(*arguments: Any) -> Any:
        if what == "an exception":
            raise OSError("the driver was unloaded")
        return GARBLED[what]

    for name in (
        "nvmlDeviceGetPowerUsage",
        "nvmlDeviceGetClockInfo",
        "nvmlDeviceGetCurrentClocksEventReasons",
        "nvmlDeviceGetPcieReplayCounter",
        "nvmlDeviceGetFieldValues",
        "nvmlDeviceGetRemappedRows",
        "nvmlDeviceGetName",
        "nvmlSystemGetDriverVersion",
    ):
        monkeypatch.setattr(pynvml, name, answer)
    training = Training(tmp_path)
    training.readings(3)
    assert training.poller.is_alive()
    training.exporter.close()
    records = [step for step in lines_of(training) if "gpu_temperature_celsius" in step.signals]
    assert {step.signals["gpu_temperature_celsius"] for step in records} == {61.0}
    assert not any("gpu_power_watts" in step.signals or "gpu_pcie_replays" in step.signals for step in records)
    assert len(training.told("device")) == 1
    said = training.exporter.notices
    assert len([notice for notice in said if notice.startswith("power")]) <= 1
    assert all("gpu" in notice.lower() for notice in said), said


@pytest.mark.parametrize("what", [None, "an exception"])
def test_a_wait_for_xids_that_is_garbled_ends_the_waiting_and_not_the_readings(
    machine: Machine,  # noqa: F811
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    what: str | None,
) -> None:
    import pynvml

    def answer(*arguments: Any) -> Any:
        if what is not None:
            raise OSError("interrupted")

    monkeypatch.setattr(pynvml, "nvmlEventSetWait_v2", answer)
    training = Training(tmp_path)
    training.readings(3)
    assert training.poller.is_alive()
    training.exporter.close()
    assert len(training.exporter.notices) == 1
    assert "XIDs" in training.exporter.notices[0]


def test_a_wait_for_xids_that_comes_back_at_once_is_not_called_without_a_pause(
    machine: Machine,  # noqa: F811
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    import pynvml

    calls: list[float] = []

    def answer(*arguments: Any) -> Any:
        calls.append(time.monotonic())
        raise pynvml.NVMLError(pynvml.NVML_ERROR_TIMEOUT)

    monkeypatch.setattr(pynvml, "nvmlEventSetWait_v2", answer)
    training = Training(tmp_path)
    training.readings(5)
    training.exporter.close()
    assert len(calls) < 20 * training.poller.readings


def lines_of(training: Training) -> list[Step]:
    from tests.exporter.runs import lines

    return [line for line in lines(training.folder) if isinstance(line, Step)]
