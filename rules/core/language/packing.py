"""State as plain values: what a snapshot holds is the same in JSON and in msgpack, and reads back to the last bit.

JSON has no NaN and no infinities, and a list of a thousand numbers is long: arrays become base64 of their bytes, whole
numbers that grow evenly become runs, and a lone float is a number or a word.
"""

from __future__ import annotations

import base64
import math
from typing import Any

import numpy as np

from trainwarden.record import decode_number, encode_numbers
from trainwarden.rules.core.block import Floats, Ints


def pack_floats(values: Floats) -> str:
    """Return float64 values as text."""
    return base64.b64encode(np.ascontiguousarray(values, dtype="<f8").tobytes()).decode()


def unpack_floats(text: Any) -> Floats:
    """Return what :func:`pack_floats` was given."""
    return np.frombuffer(base64.b64decode(text), dtype="<f8").astype(np.float64)


def pack_ints(values: Ints) -> list[list[int]]:
    """Return whole numbers as runs ``[first, difference, count]``; steps of a log are one run as a rule."""
    runs: list[list[int]] = []
    gaps = np.diff(values)
    if len(gaps) and (gaps == gaps[0]).all():  # one run, as a rule
        return [[int(values[0]), int(gaps[0]), len(values)]]
    plain = values.tolist()
    start = 0
    while start < len(plain):
        end = start + 1
        difference = plain[end] - plain[start] if end < len(plain) else 0
        while end < len(plain) and plain[end] - plain[end - 1] == difference:
            end += 1
        runs.append([plain[start], difference, end - start])
        start = end
    return runs


def unpack_ints(runs: Any) -> Ints:
    """Return what :func:`pack_ints` was given."""
    parts = [first + difference * np.arange(count, dtype=np.int64) for first, difference, count in runs]
    return np.concatenate(parts) if parts else np.zeros(0, dtype=np.int64)


def pack_float(value: float) -> float | str:
    """Return one float as a number, or as the word of a non-finite one."""
    packed: float | str = encode_numbers(float(value))
    return packed


def unpack_float(value: Any) -> float:
    """Return what :func:`pack_float` was given."""
    found = decode_number(value, "state")
    return math.nan if found is None else found
