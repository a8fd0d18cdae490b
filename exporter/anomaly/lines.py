"""What a close look has seen in full: ``anomaly.jsonl`` beside the rank's journal, a line of JSON each for module or parameter and step.

Bounded: each step has its share of the file. What does not fit is left out, and how much that is stands in the step's last line; what is not
finite is written first, then blocks, then everything in the order of the model. Written on the drain thread.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import msgspec

from trainwarden.record import encode_numbers

#: Bytes of all steps of a look together, and the least that a step has.
BYTES, LEAST = 256 * 2**20, 128 * 2**10
#: Name of the file.
NAME = "anomaly.jsonl"


class Lines:
    """Appends to one file. ``written`` and ``left_out`` count lines."""

    def __init__(self, folder: Path, steps: int) -> None:
        self.path = folder / NAME
        self._share = max(BYTES // steps, LEAST)
        self.written = 0
        self.left_out = 0

    def write(self, step: int, rows: Iterable[Mapping[str, Any]], left_out: int) -> None:
        """Write the lines of a step, the most important first; ``left_out`` were not even sent.

        Raises:
            OSError: the disk is full, or the folder cannot be written.
        """
        lines: list[bytes] = []
        room = self._share
        for row in rows:
            line = msgspec.json.encode(encode_numbers({"step": step, **row})) + b"\n"
            if len(line) > room:
                left_out += 1
                continue
            room -= len(line)
            lines.append(line)
        end = {"step": step, "what": "step", "lines": len(lines), "left_out": left_out}
        lines.append(msgspec.json.encode(end) + b"\n")
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with self.path.open("ab") as file:
            file.write(b"".join(lines))
        self.written += len(lines) - 1
        self.left_out += left_out
