"""A rank's GPU asked about its health, over the real binding of NVML and a library of its name that a test may set right or wrong."""

from __future__ import annotations

import math
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch

from tests.exporter.nvml import IS_LOST, NOT_SUPPORTED, UNKNOWN, UUID, Machine, build, need_binding
from tests.exporter.runs import events, lines, loss_of, make, watch
from tests.exporter.seams import Watch
from tests.exporter.test_page import scrape
from tests.real import wait_until
from trainwarden.exporter import Exporter
from trainwarden.exporter.hardware import Hardware, Used, poller
from trainwarden.exporter.notices import Notices
from trainwarden.gpu_signals import CLOCK_REASONS
from trainwarden.record import Step
from trainwarden.signals import SIGNALS

#: Seconds between two readings in these tests.
PERIOD = 0.1
BY_CLOCK = {signal.name for signal in SIGNALS if signal.per == "clock"}


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The library, loaded once: what has its name is found by the binding from then on."""
    import ctypes

    need_binding()
    path = build(tmp_path_factory.mktemp("nvml"))
    ctypes.CDLL(str(path), mode=ctypes.RTLD_GLOBAL)
    return path


@pytest.fixture
def machine(library: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Machine]:
    """A host with one healthy GPU, on which the models of these tests pretend to lie."""
    found = Machine(tmp_path / "nvml.says")
    found.says()
    monkeypatch.setenv("NVML_SAYS", str(found.file))
    monkeypatch.setenv("NVML_UUID", UUID)
    monkeypatch.setattr(poller, "used_by", lambda parameters: Used(UUID))
    yield found
    for training in Training.open:
        training.exporter.close()
    Training.open.clear()
    for thread in threading.enumerate():
        if thread.name == "trainwarden-hardware":
            thread.join(10)


class Training:
    """A small model that is trained as long as a test wants."""

    open: ClassVar[list[Training]] = []

    def __init__(self, folder: Path, **settings: Any) -> None:
        self.folder = folder
        self.model = make()
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=1e-3)
        self.exporter: Exporter = watch(
            self.model, self.optimizer, folder, **{"hardware_seconds": PERIOD, "cadence": 1, **settings}
        )
        self.made = 0
        self.open.append(self)

    def step(self, count: int = 1, seconds: float = 0.0) -> None:
        for _ in range(count):
            self.optimizer.zero_grad()
            self.made += 1
            loss = loss_of(self.model, self.made)
            loss.backward()
            self.optimizer.step()
            self.exporter.step(loss)
            time.sleep(seconds)

    @property
    def poller(self) -> Hardware:
        assert self.exporter._parts is not None
        return self.exporter._parts.hardware

    def until(self, condition: Callable[[], Any], seconds: float = 20.0) -> Any:
        """Train on until something is so."""

        def look() -> Any:
            self.step(seconds=0.01)
            return condition()

        return wait_until(look, seconds, every=0.0)

    def readings(self, count: int) -> None:
        """Train on until so many more readings were made."""
        wanted = self.poller.readings + count
        self.until(lambda: self.poller.readings >= wanted)

    def records(self) -> list[Step]:
        """Close the exporter and return the records; a notice fails the test."""
        self.exporter.close()
        assert self.exporter.notices == []
        return [line for line in lines(self.folder) if isinstance(line, Step)]

    def told(self, what: str) -> list[dict[str, Any]]:
        return [event.fields for event in events(self.folder, "hardware") if event.fields["what"] == what]

    def shown(self) -> dict[str, float]:
        """What the page shows of the GPU, by series without run and rank."""
        found = {}
        for line in scrape(self.exporter.port).splitlines():
            if line.startswith("train_gpu_"):
                series, value = line.rsplit(" ", 1)
                found[series.replace('rank="0",run="run"', "").replace('rank="0",', "").replace(',run="run"', "")] = (
                    float(value)
                )
        return {name.replace("{}", ""): value for name, value in found.items()}


def column(records: list[Step], name: str) -> list[float]:
    return [float(step.signals[name]) for step in records if name in step.signals]  # type: ignore[arg-type]


def test_what_the_gpu_says_is_in_a_record_in_base_units(machine: Machine, tmp_path: Path) -> None:
    machine.changes(reasons=0x48, retired_single=2, retired_double=1)
    training = Training(tmp_path)
    training.readings(2)
    found = next(step for step in training.records() if "gpu_power_watts" in step.signals).signals
    expected = {
        "gpu_temperature_celsius": 61.0,
        "gpu_memory_temperature_celsius": 74.0,
        "gpu_power_watts": 412.0,
        "gpu_power_limit_watts": 700.0,
        "gpu_sm_clock_hertz": 1.755e9,
        "gpu_sm_clock_ratio": 1755 / 1980,
        "gpu_throttled": 1.0,
        "gpu_remapped_rows": 1.0,
        "gpu_row_remap_pending": 0.0,
        "gpu_row_remap_failed": 0.0,
        "gpu_retired_pages": 3.0,
        "gpu_ecc_corrected": 0.0,
        "gpu_ecc_uncorrected": 0.0,
        "gpu_pcie_replays": 0.0,
        "gpu_nvlink_errors": 0.0,
        "gpu_xid_errors": 0.0,
        "gpu_faults": 0.0,
    }
    assert {name: found[name] for name in expected} == expected
    reasons = found["gpu_clocks_event"]
    assert isinstance(reasons, dict)
    assert tuple(reasons) == CLOCK_REASONS
    assert {name for name, on in reasons.items() if on} == {"hw_slowdown", "hw_thermal_slowdown"}
    assert {name for name in found if name.startswith("gpu_")} == BY_CLOCK


def test_the_device_is_introduced_once(machine: Machine, tmp_path: Path) -> None:
    training = Training(tmp_path)
    training.readings(3)
    training.records()
    (told,) = training.told("device")
    assert told["uuid"] == f"GPU-{UUID}"
    assert (told["name"], told["driver"]) == ("NVIDIA Pretended", "580.1")
    assert told["host"]


def test_a_reading_is_in_one_record_and_no_other(machine: Machine, tmp_path: Path) -> None:
    training = Training(tmp_path, hardware_seconds=0.5)
    training.readings(3)
    records = training.records()
    told = len(column(records, "gpu_temperature_celsius"))
    assert 2 <= told <= training.poller.readings < len(records)


def test_counters_count_from_the_exporters_beginning_and_every_increment_is_told_once(
    machine: Machine, tmp_path: Path
) -> None:
    training = Training(tmp_path)
    training.readings(2)
    machine.changes(ecc_uncorrected=2)
    training.readings(2)
    machine.changes(ecc_uncorrected=5, pcie_replays=1)  # the second began anew
    training.readings(2)
    training.step(2, seconds=0.1)
    shown = training.shown()
    records = training.records()
    assert sum(column(records, "gpu_ecc_uncorrected")) == 5.0 == shown["train_gpu_ecc_uncorrected_total"]
    assert sum(column(records, "gpu_pcie_replays")) == 1.0 == shown["train_gpu_pcie_replays_total"]
    assert sum(column(records, "gpu_ecc_corrected")) == 0.0 == shown["train_gpu_ecc_corrected_total"]


def test_increments_of_readings_between_two_steps_are_not_lost(machine: Machine, tmp_path: Path) -> None:
    training = Training(tmp_path)
    training.readings(1)
    for total in (1, 2, 3):
        machine.changes(ecc_uncorrected=total)
        before = training.poller.readings
        wait_until(lambda before=before: training.poller.readings >= before + 2)
    training.step()
    assert sum(column(training.records(), "gpu_ecc_uncorrected")) == 3.0


def test_what_a_device_does_not_have_is_absent_and_asked_for_once(machine: Machine, tmp_path: Path) -> None:
    machine.changes(power=None, events=None)
    machine.fails("ecc_corrected", NOT_SUPPORTED)
    training = Training(tmp_path)
    training.readings(2)
    machine.says()
    training.readings(2)
    shown = training.shown()
    records = training.records()
    absent = {"gpu_power_watts", "gpu_ecc_corrected", "gpu_retired_pages", "gpu_xid_errors", "gpu_faults"}
    assert {name for step in records for name in step.signals if name.startswith("gpu_")} == BY_CLOCK - absent
    assert not any(name.startswith(tuple(f"train_{name}" for name in absent)) for name in shown)


def test_what_fails_for_a_moment_comes_again(machine: Machine, tmp_path: Path) -> None:
    machine.fails("temperature", UNKNOWN)
    training = Training(tmp_path)
    training.readings(2)
    assert "train_gpu_temperature_celsius" not in training.shown()
    machine.says(temperature=70)
    training.until(lambda: training.shown().get("train_gpu_temperature_celsius") == 70.0)
    training.step()
    assert set(column(training.records(), "gpu_temperature_celsius")) == {70.0}


def test_reasons_are_read_from_older_drivers_too(machine: Machine, tmp_path: Path) -> None:
    machine.fails("reasons", 13)  # function not found
    machine.changes(old_reasons=0x4)
    training = Training(tmp_path)
    training.readings(1)
    training.step(2, seconds=0.1)
    records = training.records()
    found = [step.signals["gpu_clocks_event"] for step in records if "gpu_clocks_event" in step.signals]
    assert found[0]["sw_power_cap"] == 1.0  # type: ignore[index]
    assert set(column(records, "gpu_throttled")) == {0.0}  # a cap is a setting


def test_an_xid_is_told_with_its_meaning_and_a_fault_counts_as_one(machine: Machine, tmp_path: Path) -> None:
    training = Training(tmp_path)
    training.readings(1)
    for code in (13, 79, 13, 999):
        machine.xid(code)
    training.until(lambda: training.shown().get("train_gpu_xid_errors_total") == 4.0)
    training.step(2, seconds=0.1)
    shown = training.shown()
    records = training.records()
    told = training.told("xid")
    assert [one["code"] for one in told] == [13, 79, 999]
    assert [(one["points_to"], one["fault"]) for one in told] == [
        ("program", False),
        ("device", True),
        ("unclear", False),
    ]
    assert "bus" in told[1]["meaning"]
    assert {one["uuid"] for one in told} == {f"GPU-{UUID}"}
    assert sum(column(records, "gpu_xid_errors")) == 4.0
    assert sum(column(records, "gpu_faults")) == 1.0 == shown["train_gpu_faults_total"]


def test_an_xid_is_told_at_once_whatever_the_period(machine: Machine, tmp_path: Path) -> None:
    training = Training(tmp_path, hardware_seconds=600.0)
    training.until(lambda: training.poller.readings)
    training.step()
    machine.xid(48)
    wait_until(lambda: training.told("xid"), 10.0)
    (event,) = [one for one in events(tmp_path, "hardware") if one.fields["what"] == "xid"]
    assert event.step == training.made
    training.records()


def test_a_gpu_that_is_lost_is_told_and_nothing_of_it_is_shown_any_more(machine: Machine, tmp_path: Path) -> None:
    training = Training(tmp_path)
    training.readings(2)
    machine.fails("power", IS_LOST)
    wait_until(lambda: not training.poller.is_alive())
    training.step(2, seconds=0.1)
    shown = training.shown()
    last = training.made
    training.step(3, seconds=0.05)
    records = training.records()
    (lost,) = training.told("lost")
    assert lost["fault"] is True
    assert math.isnan(shown["train_gpu_temperature_celsius"])
    assert shown["train_gpu_faults_total"] == 1.0
    assert sum(column(records, "gpu_faults")) == 1.0
    assert not any("gpu_temperature_celsius" in step.signals for step in records if step.step > last)


def test_a_gpu_that_is_lost_while_xids_are_waited_for_is_told_too(machine: Machine, tmp_path: Path) -> None:
    training = Training(tmp_path, hardware_seconds=600.0)
    training.until(lambda: training.poller.readings)
    machine.fails("wait", IS_LOST)
    wait_until(lambda: not training.poller.is_alive())
    training.step()
    training.records()
    assert len(training.told("lost")) == 1


def test_a_call_that_hangs_holds_up_neither_the_training_nor_its_end(machine: Machine, tmp_path: Path) -> None:
    training = Training(tmp_path)
    training.readings(1)
    machine.hangs("power", 6.0)
    before = training.poller.readings
    time.sleep(5 * PERIOD)  # it hangs now, and what it read before is too old
    began = time.monotonic()
    training.step(20)
    records = training.records()
    assert time.monotonic() - began < 4.0
    assert training.poller.is_alive()
    assert training.poller.readings <= before + 1
    assert len(records) == training.made


def test_a_reading_that_is_too_old_is_not_told(machine: Machine, tmp_path: Path) -> None:
    training = Training(tmp_path)
    wait_until(lambda: training.poller.readings >= 2)
    machine.changes(ecc_uncorrected=1)
    before = training.poller.readings
    wait_until(lambda: training.poller.readings >= before + 2)
    machine.hangs("temperature", 2.0)
    time.sleep((poller.OLD_PERIODS + 3) * PERIOD)
    training.step()
    (record,) = training.records()
    assert "gpu_power_watts" not in record.signals
    assert record.signals["gpu_ecc_uncorrected"] == 1.0  # what happened, happened


def test_the_page_goes_on_while_no_step_is_made(machine: Machine, tmp_path: Path) -> None:
    training = Training(tmp_path)
    training.step()
    machine.changes(temperature=97)
    wait_until(lambda: training.shown().get("train_gpu_temperature_celsius") == 97.0)
    training.records()


def test_of_a_part_of_a_gpu_the_whole_is_read_and_the_xids_of_other_parts_are_not_its(
    machine: Machine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    part = "9f3b2c1d-0000-1111-2222-333344445555"
    monkeypatch.setenv("NVML_MIG_UUID", part)
    monkeypatch.setattr(poller, "used_by", lambda parameters: Used(part))
    machine.changes(xid_instance=3)
    training = Training(tmp_path)
    training.readings(1)
    machine.xid(13)
    training.readings(3)
    machine.changes(xid_instance=5)
    machine.xid(31)
    training.until(lambda: training.shown().get("train_gpu_xid_errors_total") == 1.0)
    assert training.shown()["train_gpu_temperature_celsius"] == 61.0
    training.records()
    assert [one["code"] for one in training.told("xid")] == [31]
    assert training.told("device")[0]["uuid"] == f"GPU-{UUID}"
    assert training.told("device")[0]["gpu_instance"] == 5


def test_a_device_without_a_uuid_is_found_by_its_place_on_the_bus(
    machine: Machine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NVML_BUS", "00000000:1b:00.0")
    monkeypatch.setattr(poller, "used_by", lambda parameters: Used(bus="00000000:1b:00.0"))
    training = Training(tmp_path)
    training.readings(1)
    training.records()
    assert training.told("device")[0]["uuid"] == f"GPU-{UUID}"


@pytest.mark.parametrize("trouble", ["no binding", "no driver", "unknown device", "broken"])
def test_a_gpu_that_cannot_be_asked_is_said_once_and_the_training_goes_on(
    machine: Machine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, trouble: str
) -> None:
    says = {
        "no binding": "pip install nvidia-ml-py",
        "no driver": "utility",
        "unknown device": UUID[::-1],
        "broken": "hardware",
    }
    if trouble == "no binding":
        monkeypatch.setitem(sys.modules, "pynvml", None)
    elif trouble == "no driver":
        machine.fails("init", 12)  # library not found
    elif trouble == "unknown device":
        monkeypatch.setattr(poller, "used_by", lambda parameters: Used(UUID[::-1]))
    else:
        machine.fails("handle", UNKNOWN)
    training = Training(tmp_path)
    training.until(lambda: training.exporter.notices)
    wait_until(lambda: not training.poller.is_alive())
    training.step(3)
    training.exporter.close()
    (said,) = training.exporter.notices
    assert says[trouble] in said
    records = [line for line in lines(tmp_path) if isinstance(line, Step)]
    assert len(records) == training.made
    assert not any(name.startswith("gpu_") for step in records for name in step.signals)


def test_without_a_gpu_there_is_no_thread_no_series_and_no_word_of_it(tmp_path: Path) -> None:
    training = Training(tmp_path)
    training.step(3, seconds=0.05)
    assert training.poller.ident is None
    assert training.shown() == {}
    records = training.records()
    assert not any(name.startswith("gpu_") for step in records for name in step.signals)
    assert events(tmp_path, "hardware") == []


def test_zero_seconds_turn_it_off(machine: Machine, tmp_path: Path) -> None:
    training = Training(tmp_path, hardware_seconds=0)
    training.step(3, seconds=0.05)
    assert training.poller.ident is None
    training.records()


def test_a_model_that_is_moved_after_the_exporter_was_made_is_found_at_the_next_regular_step(
    machine: Machine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    place: list[Used | None] = [None]
    monkeypatch.setattr(poller, "used_by", lambda parameters: place[0])
    training = Training(tmp_path)
    training.step(2, seconds=0.05)
    assert training.poller.ident is None
    place[0] = Used(UUID)
    training.until(lambda: training.poller.readings)
    training.records()


def test_the_training_thread_neither_waits_for_it_nor_asks_the_driver(machine: Machine, tmp_path: Path) -> None:
    import pynvml

    callers: set[str] = set()
    asked = pynvml._nvmlGetFunctionPointer
    patch = pytest.MonkeyPatch()
    patch.setattr(
        pynvml, "_nvmlGetFunctionPointer", lambda name: callers.add(threading.current_thread().name) or asked(name)
    )
    try:
        with Watch() as watching:
            training = Training(tmp_path)
            training.step(3)
            watching.caught.clear()
            training.step(20, seconds=0.02)
            found = [one for one in watching.caught if "sleep" not in str(one)]
        training.records()
    finally:
        patch.undo()
    assert found == []
    assert callers == {"trainwarden-hardware"}


@pytest.mark.parametrize("wrong", [-1, math.nan, math.inf, "5", True, None])
def test_a_period_that_is_none_is_refused_by_name(tmp_path: Path, wrong: Any) -> None:
    model = make()
    with pytest.raises((TypeError, ValueError), match="hardware_seconds"):
        watch(model, torch.optim.SGD(model.parameters(), lr=0.1), tmp_path, hardware_seconds=wrong)


def test_it_ends_when_told_although_it_never_began() -> None:
    thread = Hardware(1.0, Notices())
    thread.end()
    thread.begin()
    assert not thread.is_alive()
