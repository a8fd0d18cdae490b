"""A recorded run for tests: it learns, breaks at a step, and is rolled back to an earlier one by its second attempt."""

from __future__ import annotations

import math
import random
from pathlib import Path
from typing import Any

from trainwarden.record import Event, Header, Step, encode_line

BREAK, END = 400, 600


def lines_of(attempt: int, resumed: int, last: int, break_at: int | None, began: float) -> list[Step | Event]:
    """Return one attempt's lines; from ``break_at`` on the loss grows and stays up."""
    noise = random.Random(attempt)
    start: dict[str, Any] = {
        "run_uid": "uid-rec",
        "run": "rec",
        "attempt": attempt,
        "start_id": f"s{attempt}",
        "rank": 0,
        "world_size": 1,
        "can_skip": ["substitute"],
        "dataset": "d",
        "batch_size": 8,
    }
    lines: list[Step | Event] = [Event(kind="start", time=began, seq=1, step=resumed, fields=start)]
    for step in range(resumed + 1, last + 1):
        bad = break_at is not None and step >= break_at
        loss = 2.0 + 8.0 / math.sqrt(step) + noise.gauss(0, 0.02) + (5.0 if bad else 0.0)
        grad = (1.0 + noise.gauss(0, 0.05)) * (30.0 if bad else 1.0)
        time = began + (step - resumed) * 1.0
        lines.append(
            Step(
                seq=len(lines) + 1,
                step=step,
                time=time,
                signals={"loss": loss, "grad_norm": {"all": grad}, "lr": {"all": 1e-3}, "epoch": 0.0},
                samples=[((step - 1) * 8, step * 8)],
            )
        )
        if step % 100 == 0:
            fields = {"path": f"/ckpt/{step}", "complete": True, "finite": True}
            lines.append(Event(kind="checkpoint", time=time, seq=len(lines) + 1, step=step, fields=fields))
    return lines


def record(folder: Path) -> Path:
    """Write the run's folder."""
    for attempt, lines in enumerate((lines_of(0, 0, END, BREAK, 1.7e9),)):
        path = folder / f"attempt-{attempt}" / f"s{attempt}" / "rank-0" / "00001.ndjson"
        path.parent.mkdir(parents=True)
        header = Header(run_uid="uid-rec", run="rec", attempt=attempt, start_id=f"s{attempt}")
        path.write_bytes(b"".join(encode_line(line) + b"\n" for line in [header, *lines]))
    return folder
