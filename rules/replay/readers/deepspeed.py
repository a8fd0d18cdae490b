"""DeepSpeed's text log: ``[Rank 0] step=10, skipped=4, lr=[5e-05], mom=[(0.9, 0.95)]`` and, with its pipeline engine,
``steps: 10 loss: 8.9 iter time (s): 1.2 samples/sec: 3.4``.

``skipped`` counts from the start; here it is the increase since the line before. An overflow tells the loss scale that follows.
"""

from __future__ import annotations

import re

from trainwarden.rules.replay.rows import Notices, Reader
from trainwarden.rules.replay.texts import NUMBER, STEP, TextLog, share_of, value_of

_PROGRESS = re.compile(rb"\bstep=(\d+), skipped=(\d+), lr=\[([^\]]*)\]")
_PIPELINE = re.compile(rb"\bsteps: (\d+) loss: (" + NUMBER + rb")\s(.*)", re.IGNORECASE)
_PAIR = re.compile(rb"([A-Za-z][^:]*?): (" + NUMBER + rb")(?:\s|$)", re.IGNORECASE)
_SCALE = re.compile(rb"Attempted loss scale: " + NUMBER + rb", reducing to (" + NUMBER + rb")")
_SPEED = re.compile(rb"global_step=(\d+), .*?CurrSamplesPerSec=(" + NUMBER + rb")")


def recognises(head: list[bytes], name: str) -> float:
    """Say how sure it is, 0 to 1, that a file with these first lines is of this format."""
    return 0.9 if share_of(head, lambda line: _PROGRESS.search(line) or _PIPELINE.search(line)) else 0.0


def reader(notices: Notices) -> Reader:
    """Return a reader that begins at a file's first line."""
    return TextLog(notices, _Parser().parse)


class _Parser:
    def __init__(self) -> None:
        self._skipped = 0.0
        self._scale: float | None = None

    def parse(self, line: bytes) -> dict[str, float] | None:
        """Return the numbers of a line."""
        found = _PROGRESS.search(line)
        if found is not None:
            return self._progress(found)
        found = _PIPELINE.search(line)
        if found is not None:
            return _pipeline(found)
        found = _SPEED.search(line)
        if found is not None:
            speed = value_of(found[2])
            return None if speed is None else {STEP: float(found[1]), "samples_per_second": speed}
        found = _SCALE.search(line)
        if found is not None:
            self._scale = value_of(found[1])
        return None

    def _progress(self, found: re.Match[bytes]) -> dict[str, float]:
        skipped = float(found[2])
        values = {STEP: float(found[1]), "skipped": skipped - self._skipped if skipped >= self._skipped else skipped}
        self._skipped = skipped
        rates = [rate for rate in (value_of(text.strip()) for text in found[3].split(b",")) if rate is not None]
        if rates:
            values["lr"] = max(rates)
        if self._scale is not None:
            values["loss_scale"], self._scale = self._scale, None
        return values


def _pipeline(found: re.Match[bytes]) -> dict[str, float] | None:
    loss = value_of(found[2])
    if loss is None:
        return None
    values = {STEP: float(found[1]), "loss": loss}
    for name, text in _PAIR.findall(found[3]):
        value = value_of(text)
        if value is not None:
            known = {b"iter time (s)": "step_duration_seconds", b"samples/sec": "pipeline_samples_per_second"}
            values[known.get(name, name.decode(errors="replace"))] = value
    return values
