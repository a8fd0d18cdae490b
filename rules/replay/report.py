"""What replay found: one object a recording, and its JSON. Words and pictures of it are made in ``rules/report``."""

from __future__ import annotations

from typing import Any

import msgspec

from trainwarden.record import encode_numbers
from trainwarden.rules.core.language import Pack

from .driver import Outcome
from .recordings import Recording


def report(recording: Recording, outcome: Outcome, pack: Pack, *, paper: bool = True) -> dict[str, Any]:
    """Return the JSON object of one recording. On ``paper`` nothing was delivered, so ``done`` is null.

    ``judged`` are its signals that some alert of the pack reads.
    """
    read = frozenset[str]().union(*(pack.reads(rule) for rule in pack.rules))
    return {
        "source": recording.source,
        "run": recording.run,
        "records": outcome.records,
        "first_step": outcome.first_step,
        "last_step": outcome.last_step,
        "stride": outcome.stride,
        "signals": list(outcome.signals),
        "judged": [name for name in outcome.signals if name in read],
        "columns": recording.columns,
        "incidents": [{**row, "done": None} if paper else row for row in outcome.incidents.values()],
        "notices": recording.notices + list(outcome.notices.values()),
        "suspects": [row for row in outcome.suspects.values() if row["run_uid"] == recording.run_uid],
    }


def to_json(reports: list[dict[str, Any]]) -> bytes:
    """Encode reports; non-finite numbers become their words, as in a record."""
    encoded = msgspec.json.encode(encode_numbers(reports))
    return msgspec.json.format(encoded, indent=2) + b"\n"
