"""What is read of a device: one small function a quantity, so that one that a device lacks costs no other.

Names are those of :mod:`trainwarden.signals`; units are base units. NVML gives milliwatts, megahertz and whole degrees. Of counters it
gives a total since the driver was loaded; :class:`Counts` makes increments of it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

from trainwarden.record import Value

#: What NVML says of a device: a number a signal.
Found = dict[str, float]

#: Bits of the reasons for which clocks are below what they could be, as ``nvml.h`` has them since clocks have reasons.
REASONS: Mapping[str, int] = {
    "gpu_idle": 0x1,
    "applications_clocks_setting": 0x2,
    "sw_power_cap": 0x4,
    "hw_slowdown": 0x8,
    "sync_boost": 0x10,
    "sw_thermal_slowdown": 0x20,
    "hw_thermal_slowdown": 0x40,
    "hw_power_brake_slowdown": 0x80,
    "display_clock_setting": 0x100,
}
#: Those that are nobody's choice: heat, the power brake, and what the hardware does by itself. A power cap is a setting.
THROTTLED = ("hw_slowdown", "sw_thermal_slowdown", "hw_thermal_slowdown", "hw_power_brake_slowdown")
#: Totals of which a record holds the increment.
COUNTED = ("gpu_ecc_corrected", "gpu_ecc_uncorrected", "gpu_pcie_replays", "gpu_nvlink_errors")
#: Types of the union in which NVML gives the values of fields, by ``valueType``.
_UNION = ("dVal", "uiVal", "ulVal", "ullVal", "sllVal", "siVal", "usVal")


def temperature(nvml: Any, handle: Any) -> Found:
    """Temperature of the chip, °C."""
    return {"gpu_temperature_celsius": float(nvml.nvmlDeviceGetTemperature(handle, nvml.NVML_TEMPERATURE_GPU))}


def power(nvml: Any, handle: Any) -> Found:
    """Power draw in watts, averaged by the device over about a second."""
    return {"gpu_power_watts": nvml.nvmlDeviceGetPowerUsage(handle) / 1000}


def power_limit(nvml: Any, handle: Any) -> Found:
    """Limit of the power draw in watts."""
    return {"gpu_power_limit_watts": nvml.nvmlDeviceGetEnforcedPowerLimit(handle) / 1000}


def clocks(nvml: Any, handle: Any) -> Found:
    """Clock of the multiprocessors in hertz, and its ratio to the highest that the device has."""
    clock = nvml.nvmlDeviceGetClockInfo(handle, nvml.NVML_CLOCK_SM)
    found = {"gpu_sm_clock_hertz": clock * 1e6}
    highest = nvml.nvmlDeviceGetMaxClockInfo(handle, nvml.NVML_CLOCK_SM)
    if highest > 0:
        found["gpu_sm_clock_ratio"] = clock / highest
    return found


def clocks_events(nvml: Any, handle: Any) -> Found:
    """Reasons of lowered clocks as one number of bits, taken apart by :func:`by_reason`."""
    ask = getattr(nvml, "nvmlDeviceGetCurrentClocksEventReasons", None)
    try:
        if ask is not None:
            return {"gpu_clocks_event": float(ask(handle))}
    except nvml.NVMLError as error:
        if error.value != nvml.NVML_ERROR_FUNCTION_NOT_FOUND:
            raise
    # As it was called before driver 535.
    return {"gpu_clocks_event": float(nvml.nvmlDeviceGetCurrentClocksThrottleReasons(handle))}


def ecc_corrected(nvml: Any, handle: Any) -> Found:
    """Bit flips that ECC corrected since the driver was loaded."""
    return {"gpu_ecc_corrected": _ecc(nvml, handle, nvml.NVML_MEMORY_ERROR_TYPE_CORRECTED)}


def ecc_uncorrected(nvml: Any, handle: Any) -> Found:
    """Memory errors that ECC saw and could not correct since the driver was loaded."""
    return {"gpu_ecc_uncorrected": _ecc(nvml, handle, nvml.NVML_MEMORY_ERROR_TYPE_UNCORRECTED)}


def _ecc(nvml: Any, handle: Any, which: int) -> float:
    return float(nvml.nvmlDeviceGetTotalEccErrors(handle, which, nvml.NVML_VOLATILE_ECC))


def remapped_rows(nvml: Any, handle: Any) -> Found:
    """Rows of memory that spare ones stand in for (Ampere and later), whether some wait for a reset, whether one could not be."""
    corrected, uncorrected, pending, failed = nvml.nvmlDeviceGetRemappedRows(handle)
    return {
        "gpu_remapped_rows": float(corrected + uncorrected),
        "gpu_row_remap_pending": float(bool(pending)),
        "gpu_row_remap_failed": float(bool(failed)),
    }


def retired_pages(nvml: Any, handle: Any) -> Found:
    """Pages of memory that are no longer used (before Ampere)."""
    causes = (
        nvml.NVML_PAGE_RETIREMENT_CAUSE_MULTIPLE_SINGLE_BIT_ECC_ERRORS,
        nvml.NVML_PAGE_RETIREMENT_CAUSE_DOUBLE_BIT_ECC_ERROR,
    )
    return {"gpu_retired_pages": float(sum(len(nvml.nvmlDeviceGetRetiredPages(handle, cause)) for cause in causes))}


def pcie_replays(nvml: Any, handle: Any) -> Found:
    """Packets that had to be sent again over PCIe."""
    return {"gpu_pcie_replays": float(nvml.nvmlDeviceGetPcieReplayCounter(handle))}


def fields(nvml: Any, handle: Any) -> Found:
    """What NVML has by number only, in one call: temperature of the memory, errors of all NVLinks together."""
    of_links = (
        nvml.NVML_FI_DEV_NVLINK_CRC_FLIT_ERROR_COUNT_TOTAL,
        nvml.NVML_FI_DEV_NVLINK_REPLAY_ERROR_COUNT_TOTAL,
        nvml.NVML_FI_DEV_NVLINK_RECOVERY_ERROR_COUNT_TOTAL,
    )
    memory, *links = nvml.nvmlDeviceGetFieldValues(handle, [nvml.NVML_FI_DEV_MEMORY_TEMP, *of_links])
    found: Found = {}
    if memory.nvmlReturn == nvml.NVML_SUCCESS and (degrees := _of_union(memory)) > 0:
        found["gpu_memory_temperature_celsius"] = degrees
    known = [_of_union(link) for link in links if link.nvmlReturn == nvml.NVML_SUCCESS]
    if known:
        found["gpu_nvlink_errors"] = sum(known)
    return found


def _of_union(field: Any) -> float:
    return float(getattr(field.value, _UNION[field.valueType]))


#: All quantities, in the order in which they are asked for.
QUANTITIES: tuple[Callable[[Any, Any], Found], ...] = (
    temperature,
    power,
    power_limit,
    clocks,
    clocks_events,
    ecc_corrected,
    ecc_uncorrected,
    remapped_rows,
    retired_pages,
    pcie_replays,
    fields,
)


class Quantities:
    """Reads a device; asks no more for what it does not have."""

    def __init__(self, nvml: Any, handle: Any) -> None:
        self._nvml, self._handle = nvml, handle
        self._left = list(QUANTITIES)
        #: What could not be understood in the newest reading: the quantity's name, and the exception.
        self.garbled: dict[str, Exception] = {}
        #: Answers with which a device is gone, and those that it will give again.
        self._gone = tuple(
            getattr(nvml, name)
            for name in ("NVML_ERROR_GPU_IS_LOST", "NVML_ERROR_RESET_REQUIRED", "NVML_ERROR_GPU_NOT_FOUND")
            if hasattr(nvml, name)
        )
        self._never = (
            nvml.NVML_ERROR_NOT_SUPPORTED,
            nvml.NVML_ERROR_FUNCTION_NOT_FOUND,
            nvml.NVML_ERROR_INVALID_ARGUMENT,
            nvml.NVML_ERROR_NO_PERMISSION,
        )

    def lost(self, error: Any) -> bool:
        """Say whether an error says that the device is gone."""
        return error.value in self._gone

    def read(self) -> Found:
        """Return all that can be read now. What fails for another reason is asked for again the next time.

        None of these is negative or infinite on any device: an answer that is, is none.

        Raises:
            NVMLError: the device is gone.
        """
        found: Found = {}
        self.garbled = {}
        for ask in tuple(self._left):
            try:
                said = ask(self._nvml, self._handle)
                found.update({name: value for name, value in said.items() if 0 <= value < math.inf})
            except self._nvml.NVMLError as error:
                if self.lost(error):
                    raise
                if error.value in self._never:
                    self._left.remove(ask)
            except AttributeError:  # a binding older than the quantity
                self._left.remove(ask)
            except Exception as error:  # an answer of another form: a damaged driver, a binding of another age
                self.garbled[ask.__name__.replace("_", " ")] = error
        return found


class Counts:
    """Makes increments of totals. A total that is lower than before began anew, with a driver or after a reset."""

    def __init__(self) -> None:
        self._last: Found = {}

    def increments(self, found: Found) -> Found:
        """Return by how much each counter rose since it was read last; 0 the first time."""
        grown: Found = {}
        for name in COUNTED:
            total = found.get(name)
            if total is not None:
                last = self._last.get(name, total)
                grown[name] = total - last if total >= last else total
                self._last[name] = total
        return grown


def by_reason(found: Found) -> dict[str, Value]:
    """Return what was read as signals: counters left out, the reasons one by one."""
    signals: dict[str, Value] = {name: value for name, value in found.items() if name not in COUNTED}
    bits = found.get("gpu_clocks_event")
    if bits is not None:
        signals["gpu_clocks_event"] = {reason: float(bool(int(bits) & bit)) for reason, bit in REASONS.items()}
        signals["gpu_throttled"] = float(any(int(bits) & REASONS[reason] for reason in THROTTLED))
    return signals
