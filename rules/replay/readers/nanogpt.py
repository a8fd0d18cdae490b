"""nanoGPT: ``iter 10: loss 9.8, time 340.00ms, mfu 3.2%`` and ``step 0: train loss 10.9, val loss 10.9``; modded-nanogpt's
``step:10/6200 train_loss:9.8 train_time:…`` and the ``10 train 9.8`` of build-nanogpt's log file.

The train loss of an evaluation is another estimate and belongs to the evaluation. Steps count from 0, as the program does.
"""

from __future__ import annotations

import re

from trainwarden.rules.replay.rows import Notices, Reader
from trainwarden.rules.replay.texts import NUMBER, STEP, TextLog, share_of, value_of

_ITERATION = re.compile(rb"\biter (\d+)(?: step \d+)?: (loss " + NUMBER + rb".*)", re.IGNORECASE)
_PART = re.compile(rb"\s*([A-Za-z_]+):? (" + NUMBER + rb")(ms|s|%)?\s*", re.IGNORECASE)
_EVALUATION = re.compile(
    rb"\bstep (\d+): train loss (" + NUMBER + rb"), val loss (" + NUMBER + rb")(?![\d.])", re.IGNORECASE
)
_MODDED = re.compile(rb"(?:^|.*?[:\]])\s*step:(\d+)/\d+((?:\s+[a-z_]+:\S+)+)")
_PAIR = re.compile(rb"([a-z_]+):(" + NUMBER + rb")(ms|s)?(?=\s|$)", re.IGNORECASE)
_SHORT = re.compile(rb"(?:^|.*?[:\]]\s)(\d+) (train|val|hella) (" + NUMBER + rb")\s*$", re.IGNORECASE)


def recognises(head: list[bytes], name: str) -> float:
    """Say how sure it is, 0 to 1, that a file with these first lines is of this format."""
    return 0.85 if share_of(head, parse) else 0.0


def reader(notices: Notices) -> Reader:
    """Return a reader that begins at a file's first line."""
    return TextLog(notices, parse)


def parse(line: bytes) -> dict[str, float] | None:
    """Return the numbers of a line."""
    found = _ITERATION.search(line)
    if found is not None:
        return {STEP: float(found[1]), **_parts(found[2])}
    found = _EVALUATION.search(line)
    if found is not None:
        trained, valued = value_of(found[2]), value_of(found[3])
        if trained is None or valued is None:
            return None
        return {STEP: float(found[1]), "eval/train_loss": trained, "val/loss": valued}
    found = _MODDED.match(line)
    if found is not None:
        pairs = {name.decode(): value_of(text) for name, text, unit in _PAIR.findall(found[2]) if not unit}
        known = {name: value for name, value in pairs.items() if value is not None}
        return {STEP: float(found[1]), **known} if known else None
    found = _SHORT.match(line)
    value = None if found is None else value_of(found[3])
    if found is None or value is None:
        return None
    return {STEP: float(found[1]), {b"train": "loss", b"val": "val/loss"}.get(found[2], "eval/hellaswag"): value}


def _parts(text: bytes) -> dict[str, float]:
    """Return the numbers of ``loss 9.8, time 340.00ms, mfu 3.2%``; children of nanoGPT add ``lr`` and ``grad_norm``."""
    values: dict[str, float] = {}
    for part in text.split(b","):
        found = _PART.fullmatch(part)
        value = None if found is None else value_of(found[2])
        if found is None or value is None:
            continue
        name = found[1].decode()
        if name == "time":
            if found[3] in (b"ms", b"s"):
                values["step_duration_seconds"] = value / 1000 if found[3] == b"ms" else value
        else:
            values[f"{name}_percent" if found[3] == b"%" else name] = value
    return values
