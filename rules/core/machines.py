"""The machines of a start, as its ranks' events tell them: hosts, domains, precision and versions, and who failed when.

Clocks of hosts differ, so an order of failures is one within a bound, and says so (case A33).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from msgspec import Struct, field

from trainwarden.record import Event

#: Seconds by which a host's clock may be off either way (case A33).
SKEW = 0.3
#: Ranks whose place is remembered; a name's characters.
MOST, LONGEST = 16_384, 256
#: Fields of a start event that name a rank's host, and the domain (rack, switch) in which it stands.
HOST, DOMAIN = ("hostname", "host", "node"), ("domain", "rack", "switch", "fabric")
#: Fields that say with what numbers are computed, in a start event or in its ``environment``.
VERSIONS = (
    "precision",
    "torch",
    "cuda",
    "cudnn",
    "nccl",
    "transformer_engine",
    "flash_attn",
    "driver",
    "kernel",
    "gpu",
)
#: Reasons of an exit that are no failure of its own (a signal may be the scheduler's), and kinds of events that are one.
ORDERLY = ("finished", "completed", "signal", "interrupted", "preempted", "stopped", "requeued", "rollback")
FAILURES = ("error", "failure", "fault", "crash", "exception", "abort")
#: Words for formats whose narrow range or few digits make kernels fail on certain inputs.
NARROW = ("fp8", "float8", "e4m3", "e5m2", "fp4", "mxfp", "int8", "fp16", "float16", "half")


class Failure(Struct, frozen=True):
    """The first failure that a rank reported: Unix seconds by its host's clock, and what it said."""

    time: float
    rank: int
    says: str = ""


class Machines(Struct):
    """Where the ranks of a start run, and which of them failed."""

    hosts: dict[int, str] = field(default_factory=dict)
    domains: dict[int, str] = field(default_factory=dict)
    versions: dict[str, str] = field(default_factory=dict)
    failures: dict[int, Failure] = field(default_factory=dict)


def describe(machines: Machines, rank: int, fields: Mapping[str, Any]) -> None:
    """Take from a rank's own event where it runs; the versions are those of the first rank that tells them."""
    told = fields.get("hosts")  # by one rank for all of them, in the order of the ranks
    if isinstance(told, list):
        for other, host in enumerate(told[:MOST]):
            if (text := _text(host)) and other not in machines.hosts:
                machines.hosts[other] = text
    if len(machines.hosts) < MOST or rank in machines.hosts:
        for names, into in ((HOST, machines.hosts), (DOMAIN, machines.domains)):
            found = next((text for name in names if (text := _text(fields.get(name)))), "")
            if found:
                into[rank] = found
    inner = [fields.get(name) for name in ("environment", "labels", "versions")]
    for source in (fields, *(one for one in inner if isinstance(one, Mapping))):
        for name in VERSIONS:
            text = _text(source.get(name))
            if text and (name not in machines.versions or source is not fields):
                machines.versions[name] = text


def failed(machines: Machines, rank: int, event: Event) -> bool:
    """Take an event that may tell of a rank's failure, and say whether it does and is the rank's first."""
    fields = event.fields
    if event.kind == "exit":
        reason = _text(fields.get("reason"))
        if not reason or reason in ORDERLY:
            return False
    elif event.kind not in FAILURES and not event.kind.endswith(("_error", "_failure")):
        return False
    if rank in machines.failures or len(machines.failures) >= MOST or not math.isfinite(event.time):
        return False
    describe(machines, rank, fields)
    says = next((text for name in ("says", "message", "error", "reason") if (text := _text(fields.get(name)))), "")
    machines.failures[rank] = Failure(event.time, rank, says)
    return True


def first_failed(failures: Mapping[int, Failure]) -> list[int]:
    """Return the ranks that may have failed first, the first by its own clock in front."""
    order = sorted(failures.values(), key=lambda one: (one.time, one.rank))
    return [one.rank for one in order if one.time <= order[0].time + 2 * SKEW]


def narrow(versions: Mapping[str, str]) -> str:
    """Return the precision where it is one of the narrow ones, else an empty text."""
    precision = versions.get("precision", "")
    words = "".join(letter if letter.isalnum() else " " for letter in precision.lower()).split()
    return precision if any(word.startswith(NARROW) for word in words) else ""


def listed(names: Sequence[str], most: int = 4) -> str:
    """Return names in a row for a sentence, the first few of many."""
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(names[:most]) + more


def _text(value: Any) -> str:
    if isinstance(value, list | tuple) and all(isinstance(one, int | str) for one in value):
        value = ".".join(map(str, value))
    return value[:LONGEST] if isinstance(value, str) else ""


__all__ = ["Failure", "Machines", "describe", "failed", "first_failed", "listed", "narrow"]
