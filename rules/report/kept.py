"""The curves that the daemon kept with an incident, as columns for drawing."""

from __future__ import annotations

from typing import Any

from trainwarden.record import Step, Value
from trainwarden.rules.core.inputs import Start
from trainwarden.rules.core.trace import TRACKED

from .recorded import Recorded

_LABELS = dict(TRACKED)
_WORDS = {"NaN": float("nan"), "+Inf": float("inf"), "-Inf": float("-inf")}


def recorded_of(curves: dict[str, Any] | None) -> Recorded:
    """Return the columns of what was kept; none of what cannot be read."""
    kept = Recorded()
    for one in (curves or {}).get("attempts") or []:
        start = Start(str(curves.get("run_uid", "")) if curves else "", "", int(one["attempt"]), str(one["start_id"]))
        signals = {name: values for name, values in one["signals"].items() if name in _LABELS}
        lines = []
        for row, step in enumerate(one["steps"]):
            record: dict[str, Value] = {}
            for name, values in signals.items():
                value = values[row]
                if value is not None:
                    _put(
                        record,
                        _LABELS[name],
                        float(_WORDS.get(value, value)) if isinstance(value, str) else float(value),
                    )
            lines.append(
                (start, 0, Step(seq=row + 1, step=step, time=0.0, stride=int(one.get("stride", 1)), signals=record))
            )
        for _ in kept.watch(lines):
            pass
    return kept


def _put(record: dict[str, Value], labels: tuple[str, ...], value: float) -> None:
    into: Any = record
    for label in labels[:-1]:
        into = into.setdefault(label, {})
        if not isinstance(into, dict):
            return
    into[labels[-1]] = value
