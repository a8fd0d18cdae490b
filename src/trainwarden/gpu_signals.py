"""What a rank's GPU says of itself, as rows of the one table in :mod:`trainwarden.signals`: read by the clock, whatever the steps do.

A series is named after its signal: ``train_`` in front, and ``_total`` behind a counter.
"""

from __future__ import annotations

from typing import Literal

#: Why a GPU's clocks are below what they could be, by the names that NVML has for it.
CLOCK_REASONS = (
    "gpu_idle",
    "applications_clocks_setting",
    "sw_power_cap",
    "hw_slowdown",
    "sync_boost",
    "sw_thermal_slowdown",
    "hw_thermal_slowdown",
    "hw_power_brake_slowdown",
    "display_clock_setting",
)

#: Name, unit, how ranks reduce it, help.
GAUGES: tuple[tuple[str, str, Literal["max", "min"], str], ...] = (
    ("gpu_temperature_celsius", "celsius", "max", "Temperature of the rank's GPU."),
    (
        "gpu_memory_temperature_celsius",
        "celsius",
        "max",
        "Temperature of the memory of the rank's GPU, where it has a sensor.",
    ),
    ("gpu_power_watts", "watts", "max", "Power draw of the rank's GPU."),
    ("gpu_power_limit_watts", "watts", "min", "Power that the rank's GPU may draw."),
    ("gpu_sm_clock_hertz", "hertz", "min", "Clock of the multiprocessors of the rank's GPU."),
    ("gpu_sm_clock_ratio", "1", "min", "Clock of the multiprocessors over the highest that the GPU has."),
    (
        "gpu_throttled",
        "1",
        "max",
        "1 while heat, the power brake or the hardware itself lowers the GPU's clocks.",
    ),
    ("gpu_remapped_rows", "rows", "max", "Rows of the GPU's memory that spare ones stand in for."),
    ("gpu_row_remap_pending", "1", "max", "1 while rows of the GPU's memory wait for a reset to be remapped."),
    ("gpu_row_remap_failed", "1", "max", "1 where a row of the GPU's memory could not be remapped."),
    (
        "gpu_retired_pages",
        "pages",
        "max",
        "Pages of the GPU's memory that are no longer used, on devices that do not remap rows.",
    ),
)

#: Name, unit, help; all are added up over the ranks.
COUNTERS: tuple[tuple[str, str, str], ...] = (
    (
        "gpu_ecc_corrected",
        "errors",
        "Memory errors of the rank's GPU that ECC corrected, since the exporter began.",
    ),
    (
        "gpu_ecc_uncorrected",
        "errors",
        "Memory errors of the rank's GPU that ECC could not correct, since the exporter began.",
    ),
    (
        "gpu_pcie_replays",
        "packets",
        "Packets between host and GPU that had to be sent again, since the exporter began.",
    ),
    (
        "gpu_nvlink_errors",
        "errors",
        "Damaged packets, replays and recoveries of all NVLinks of the GPU, since the exporter began.",
    ),
    ("gpu_xid_errors", "errors", "XIDs that the driver reported of the rank's GPU."),
    ("gpu_faults", "errors", "XIDs after which the GPU is not to be trusted, and its loss."),
)
