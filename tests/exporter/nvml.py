"""A library of NVML's name and functions, compiled when it is needed, for the real binding (``pynvml``) to load and call.

It answers from a text file that a test writes: one ``name value`` a line, read anew at each call. ``name!`` with a number of NVML's
makes that function fail with it, ``name~`` with milliseconds makes it hang. A function that has no line is not supported. XIDs are
handed out once each, in their order: lines ``xid.1 79``, ``xid.2 48``.
"""

from __future__ import annotations

import os
import subprocess
from collections.abc import Mapping
from pathlib import Path

import pytest

from tests.real import need_program

SOURCE = Path(__file__).with_name("nvml.c")
#: What a healthy H100 says, in NVML's units: °C, mW, MHz.
HEALTHY: Mapping[str, float] = {
    "temperature": 61,
    "power": 412_000,
    "power_limit": 700_000,
    "clock": 1755,
    "clock_max": 1980,
    "reasons": 0,
    "ecc_corrected": 12,
    "ecc_uncorrected": 0,
    "remapped_corrected": 1,
    "remapped_uncorrected": 0,
    "remapped_pending": 0,
    "remapped_failed": 0,
    "pcie_replays": 3,
    "field.82": 74,
    "field.38": 0,
    "field.52": 0,
    "field.59": 0,
    "events": 8,
}
UUID = "4f3b2c1d-0000-1111-2222-333344445555"
#: What NVML answers: see ``nvmlReturn_t``.
NOT_SUPPORTED, UNKNOWN, IS_LOST = 3, 999, 15


def need_binding() -> None:
    """Skip the test where the binding is absent; fail it under ``CI=true``."""
    try:
        import pynvml  # noqa: F401
    except ImportError:
        says = "nvidia-ml-py is not installed: make venv"
        if os.environ.get("CI") == "true":
            pytest.fail(says, pytrace=False)
        pytest.skip(says)


def build(folder: Path) -> Path:
    """Compile the library into a folder and return it."""
    gcc = need_program("gcc")
    folder.mkdir(parents=True, exist_ok=True)
    library = folder / "libnvidia-ml.so.1"
    command = [
        gcc,
        "-shared",
        "-fPIC",
        "-O1",
        "-Wall",
        "-Werror",
        "-Wl,-soname,libnvidia-ml.so.1",
        "-o",
        str(library),
        str(SOURCE),
    ]
    subprocess.run(command, check=True, capture_output=True, text=True)
    return library


class Machine:
    """What the library says. Change it at any time."""

    def __init__(self, file: Path) -> None:
        self.file = file
        self._says: dict[str, float] = {}
        self._xids = 0

    def says(self, values: Mapping[str, float] = HEALTHY, **more: float) -> None:
        """Say this and nothing else; ``more`` is for names without a dot."""
        self._says = {**values, **more}
        self._write()

    def changes(self, **values: float | None) -> None:
        """Change some answers; None takes one away."""
        for name, value in values.items():
            if value is None:
                self._says.pop(name, None)
            else:
                self._says[name] = value
        self._write()

    def fails(self, name: str, with_: int) -> None:
        """Make a function fail."""
        self._says[f"{name}!"] = with_
        self._write()

    def hangs(self, name: str, seconds: float) -> None:
        """Make a function take so long."""
        self._says[f"{name}~"] = 1000 * seconds
        self._write()

    def xid(self, code: int) -> None:
        """Have an XID happen."""
        self._xids += 1
        self._says[f"xid.{self._xids}"] = code
        self._write()

    def _write(self) -> None:
        text = "".join(f"{name} {value:.17g}\n" for name, value in self._says.items())
        fresh = self.file.with_suffix(".new")
        fresh.write_text(text)
        fresh.replace(self.file)
