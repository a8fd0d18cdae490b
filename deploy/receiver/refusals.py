"""Why a receiver refuses: the closed set of reasons, which is also a label of its metrics."""

from __future__ import annotations

from typing import Literal, get_args

#: ``expired``: past expires_at. ``unknown_run``: no such folder under the roots, or another run_uid lives in it.
#: ``id_reused``: the id belongs to a request for something else. ``fenced``: another ending action won this attempt.
#: ``stale``: another attempt is live. ``bad_plan``: the plan contradicts the request or itself. ``no_target``: a rollback
#: names none. ``outside_roots``, ``unreadable_target``, ``abandoned_target``, ``quarantined_target``: the checkpoint may not or
#: cannot be loaded.
#: ``no_space``: the plan cannot be written. ``unreachable``: no supervisor answers. ``not_restartable``: it answers that
#: it could not start the run again.
Reason = Literal[
    "expired",
    "unknown_run",
    "id_reused",
    "fenced",
    "stale",
    "bad_plan",
    "no_target",
    "outside_roots",
    "unreadable_target",
    "abandoned_target",
    "quarantined_target",
    "no_space",
    "unreachable",
    "not_restartable",
]
REASONS: tuple[Reason, ...] = get_args(Reason)


class RefusedError(Exception):
    """The request must not be carried out; nothing was touched."""

    def __init__(self, reason: Reason, detail: str) -> None:
        super().__init__(f"{reason}: {detail}")
        self.reason: Reason = reason
        self.detail = detail
