"""The closed set of inputs of the core: records, events, ticks, commands, receipts and observations."""

from __future__ import annotations

from typing import Any, Literal, TypeAlias

import msgspec

from trainwarden.record import Event, Step


class Start(msgspec.Struct, frozen=True):
    """One start of the whole set of ranks. Windows, baselines and cursors never span two of them."""

    run_uid: str
    run: str
    attempt: int
    start_id: str


class Steps(msgspec.Struct, frozen=True, tag=True):
    """One or more consecutive step records of one rank of one start, in order of ``seq``."""

    start: Start
    rank: int
    records: tuple[Step, ...]


class Happened(msgspec.Struct, frozen=True, tag=True):
    """One event line of one rank of one start, in order of ``seq`` with the steps around it."""

    start: Start
    rank: int
    event: Event


class Tick(msgspec.Struct, frozen=True, tag=True):
    """Time passed. ``time`` is Unix seconds: a timer feeds ticks live, the driver feeds those due in replay."""

    time: float


class SourceSeen(msgspec.Struct, frozen=True, tag=True):
    """What a source's poll said besides its lines.

    ``last_seq`` is the newest line that the exporter holds, ``caught_up`` whether this daemon has read it,
    ``authenticated`` whether the source proved itself, ``may_act`` whether the operator lets its run be acted upon,
    ``reachable`` whether it answered at all.
    """

    start: Start
    rank: int
    time: float
    last_seq: int
    caught_up: bool
    authenticated: bool
    may_act: bool
    reachable: bool = True


class Command(msgspec.Struct, frozen=True, tag=True):
    """An operator's word about an incident, with its author, or about runs: a silence, a maintenance window that has opened.

    The ``matchers`` of a window hold ``run``, a name or a pattern; ``until`` is its end, None takes back all that are open. Those of ``forget`` name suspect samples:
    ``id``, ``run`` or ``dataset``, all of which must be so, or ``all``.
    """

    name: Literal["acknowledge", "approve", "dismiss", "silence", "maintenance", "forget"]
    author: str
    time: float
    incident: str | None = None
    plan_id: str | None = None
    comment: str = ""
    matchers: dict[str, str] = msgspec.field(default_factory=dict)
    until: float | None = None


class Receipt(msgspec.Struct, frozen=True, tag=True):
    """A receiver's answer about one request, from the delivery itself or from a later look at it."""

    request_id: str
    status: Literal["accepted", "duplicate", "refused", "executed", "expired", "failed", "undeliverable"]
    time: float
    reason: str = ""
    detail: str = ""


class Observation(msgspec.Struct, frozen=True, tag=True):
    """The result of an evidence query that the core asked for."""

    query_id: str
    time: float
    values: dict[str, Any] = msgspec.field(default_factory=dict)
    error: str = ""


Input: TypeAlias = Steps | Happened | Tick | SourceSeen | Command | Receipt | Observation
