"""The closed set of effects of the core: what the driver must store, deliver or look up."""

from __future__ import annotations

from typing import Any, Literal, TypeAlias

import msgspec


class Save(msgspec.Struct, frozen=True, tag=True):
    """Store one row under its key, replacing what was there: an incident, the curves around it, a notice or suspect samples as a JSON object."""

    kind: Literal["incident", "notice", "suspect", "curves"]
    key: str
    row: dict[str, Any]


class Deliver(msgspec.Struct, frozen=True, tag=True):
    """Put one message into the outbox, at most once under its key, and deliver it at least once until ``expires_at``.

    ``webhook`` goes to the receiver of ``run`` with ``key`` as its webhook-id and ``body`` as the envelope; its answer
    comes back as a :class:`~trainwarden.rules.core.inputs.Receipt`. ``notify`` goes to the notifiers that the operator
    configured. Times are Unix seconds.
    """

    kind: Literal["webhook", "notify"]
    key: str
    run: str
    run_uid: str
    incident: str
    body: dict[str, Any]
    created: float
    expires_at: float | None = None


class Query(msgspec.Struct, frozen=True, tag=True):
    """Ask for one piece of evidence from outside the run; the answer comes back as an Observation with the same ``query_id``.

    One of kind ``suspects`` carries its answer, which the driver hands back: what one run remembers of the data is news to another.
    """

    query_id: str
    kind: str
    arguments: dict[str, Any]


Effect: TypeAlias = Save | Deliver | Query
