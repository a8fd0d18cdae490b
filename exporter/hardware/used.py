"""Which GPU a rank computes on: told by its parameters, named by its UUID, found in NVML by that name.

An index means another device to CUDA than to NVML: CUDA counts those that ``CUDA_VISIBLE_DEVICES`` leaves, in an order of its own,
NVML counts all of them by their place on the bus. A UUID is the same to both, and names a part of a device (MIG) as well.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch

#: What NVML puts in front of the UUID of a whole device and of a part of one; CUDA says the bare number of either.
PREFIXES = ("GPU-", "MIG-")


@dataclass(frozen=True, slots=True)
class Used:
    """A device as CUDA names it. ``uuid`` has no prefix; ``bus`` is its PCI address, ``domain:bus:device.0``; empty: not told."""

    uuid: str = ""
    bus: str = ""


@dataclass(frozen=True, slots=True)
class Card:
    """A device as NVML knows it. ``instance`` is the number of the part that the rank has, None for the whole device."""

    handle: Any
    uuid: str
    instance: int | None = None


def used_by(parameters: Iterable[torch.Tensor]) -> Used | None:
    """Return the CUDA device that most of some parameters lie on, None where none does. Training thread; reads no value.

    A device on which a parameter lies is initialised already, so that asking for its properties makes no context.
    """
    if torch.version.cuda is None:
        return None
    devices = Counter(parameter.device for parameter in parameters if parameter.device.type == "cuda")
    if not devices or torch.cuda.is_current_stream_capturing():
        return None
    device, _ = devices.most_common(1)[0]
    found: Any = torch.cuda.get_device_properties(device)
    bus = ""
    if hasattr(found, "pci_bus_id"):  # torch 2.9 and later
        bus = f"{found.pci_domain_id:08x}:{found.pci_bus_id:02x}:{found.pci_device_id:02x}.0"
    return Used(uuid=str(getattr(found, "uuid", "") or ""), bus=bus)


def find_card(nvml: Any, used: Used) -> Card | None:
    """Return the device as NVML knows it, None where it does not. Of a part of a device (MIG) the whole, and which part it is.

    Raises:
        NVMLError: what NVML says other than that it knows no such device.
    """
    handle = _by_uuid(nvml, used.uuid) if used.uuid else None
    if handle is None and used.bus:
        handle = _unless_unknown(nvml, nvml.nvmlDeviceGetHandleByPciBusId, used.bus)
    if handle is None:
        return None
    instance = None
    if _is_part(nvml, handle):
        instance = int(nvml.nvmlDeviceGetGpuInstanceId(handle))
        handle = nvml.nvmlDeviceGetDeviceHandleFromMigDeviceHandle(handle)
    return Card(handle, text(nvml.nvmlDeviceGetUUID(handle)), instance)


def _by_uuid(nvml: Any, uuid: str) -> Any:
    names = [uuid] if uuid.startswith(PREFIXES) else [prefix + uuid for prefix in PREFIXES]
    for name in names:
        handle = _unless_unknown(nvml, nvml.nvmlDeviceGetHandleByUUID, name)
        if handle is not None:
            return handle
    return None


def _unless_unknown(nvml: Any, ask: Any, name: str) -> Any:
    """Return the handle of a name; None where NVML knows no such device, or takes no such name (MIG before driver 470)."""
    try:
        return ask(name)
    except nvml.NVMLError as error:
        if error.value in (nvml.NVML_ERROR_NOT_FOUND, nvml.NVML_ERROR_INVALID_ARGUMENT):
            return None
        raise


def _is_part(nvml: Any, handle: Any) -> bool:
    try:
        answer = nvml.nvmlDeviceIsMigDeviceHandle(handle)
        return bool(getattr(answer, "value", answer))
    except nvml.NVMLError:  # a driver that knows no parts
        return False


def text(value: str | bytes) -> str:
    """Return what NVML says as text, whatever its bytes are."""
    if not isinstance(value, str | bytes):
        raise TypeError(f"{value!r:.40} is no text")
    return value.decode(errors="replace") if isinstance(value, bytes) else value
