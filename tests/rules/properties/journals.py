"""Made-up journals for properties: noise, and what a seed puts into it; and an ear at the rules of each start."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np

from trainwarden.record import Event, Header, Step, encode_line
from trainwarden.rules.core.alerts import AlertChange
from trainwarden.rules.core.block import Block
from trainwarden.rules.core.language import Evaluator, Pack
from trainwarden.rules.rulefiles import check_packs

#: Few rules with short windows, that fire often on these journals and have all kinds of state.
PACK = check_packs(
    [
        (
            """
groups:
  - name: g
    rules:
      - {alert: Spike, expr: "loss / ema(loss, beta=0.95) > 1.3", for: 2 steps, labels: {severity: warning, verdict: transient_spike}}
      - {alert: Outlier, expr: "zscore(loss, window=40) > 6", labels: {severity: info, verdict: outlier}}
      - {alert: Shift, expr: "mean(loss[40]) > 1.15 * mean(loss[80] offset 40)", for: 10 steps, labels: {severity: critical, verdict: level_shift}}
      - {alert: Surge, expr: "grad_norm > 3 * median(grad_norm[60] offset 5)", keep_firing_for: 5 steps, labels: {severity: warning, verdict: grad_surge}}
      - {alert: NotFinite, expr: "isnan(loss)", labels: {severity: critical, verdict: nonfinite}}
      - {alert: Often, expr: "count((loss > 1.1 * ema(loss))[50]) > 5", labels: {severity: info, verdict: other}}
      - {alert: Early, expr: "streak(loss > 0) == 7", labels: {severity: info, verdict: other}}
""",
            "property.yml",
        )
    ]
)


def lines_of(seed: int, length: int, attempt: int = 0, first: int = 1) -> list[Step | Event]:
    """Return the lines of one start: a start event, records with up to four kinds of trouble, and checkpoints."""
    rng = np.random.default_rng([seed, attempt])
    fields: dict[str, Any] = {
        "run_uid": f"uid-{seed}",
        "run": "made",
        "attempt": attempt,
        "start_id": f"s{attempt}",
        "rank": 0,
        "world_size": 1,
    }
    began = 1.7e9 + attempt * 1e6
    lines: list[Step | Event] = [Event(kind="start", time=began, seq=1, step=first - 1, fields=fields)]
    trouble = [
        (int(rng.integers(20, max(21, length))), str(rng.choice(["spike", "nan", "level", "surge"]))) for _ in range(4)
    ]
    for place in range(length):
        step = first + place
        loss = 2 + math.exp(-step / 100) + 0.04 * float(rng.normal())
        grad = float(np.exp(0.2 * rng.normal()))
        for at, kind in trouble:
            here = place >= at
            if kind == "spike" and here and place - at < 5:
                loss += 2.5
            elif kind == "nan" and here and place - at < 2:
                loss = math.nan
            elif kind == "level" and here:
                loss += 0.6
            elif kind == "surge" and here and place - at < 3:
                grad *= 8
        signals: dict[str, Any] = {"loss": loss, "grad_norm": {"all": grad}, "lr": {"all": 1e-3}}
        if rng.random() < 0.02:
            del signals["loss"]
        lines.append(Step(seq=len(lines) + 1, step=step, time=began + place, signals=signals))
        if step % 50 == 0:
            saved = {"path": f"/ckpt/{attempt}/{step}", "complete": True, "finite": True}
            lines.append(Event(kind="checkpoint", time=began + place, seq=len(lines) + 1, step=step, fields=saved))
    return lines


def encoded(lines: list[Step | Event]) -> list[bytes]:
    """Return the lines as they are written and served."""
    return [encode_line(line) for line in lines]


def write(folder: Path, seed: int, starts: list[list[Step | Event]]) -> list[Path]:
    """Write a journal of each start and return the files."""
    files = []
    for attempt, lines in enumerate(starts):
        path = folder / f"attempt-{attempt}" / f"s{attempt}" / "rank-0" / "00001.ndjson"
        path.parent.mkdir(parents=True)
        header = Header(run_uid=f"uid-{seed}", run="made", attempt=attempt, start_id=f"s{attempt}")
        path.write_bytes(b"".join(line + b"\n" for line in [encode_line(header), *encoded(lines)]))
        files.append(path)
    return files


class Ear(Evaluator):
    """The evaluator, with a list of all that it said."""

    def __init__(self, pack: Pack) -> None:
        super().__init__(pack)
        self.said: list[tuple[Any, ...]] = []

    def feed(self, block: Block) -> list[AlertChange]:
        found = super().feed(block)
        self.said += [
            (one.rule, one.state, one.step, one.since, one.time, None if one.value is None else f"{one.value:.9g}")
            for one in found
        ]
        return found


@contextmanager
def heard() -> Iterator[list[Ear]]:
    """Collect the evaluators that cores make within: one for each start, in their order."""
    ears: list[Ear] = []

    def fresh(self: Any, pack: Pack) -> Ear:
        ears.append(Ear(pack))
        return ears[-1]

    with mock.patch("trainwarden.rules.core.feed.Language.fresh", fresh):
        yield ears
