"""What the receiver asks of a scheduler, whichever it is."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Literal, Protocol

import msgspec

from trainwarden.runfolder import RunFolder


class SchedulerError(RuntimeError):
    """The scheduler cannot be reached or did not answer; try again later."""


class StaleError(RuntimeError):
    """The attempt that was named is no longer the newest one, so nothing was done."""


class Situation(msgspec.Struct, frozen=True, kw_only=True):
    """What the scheduler says of a run now.

    ``attempt``: the newest attempt, ``next_attempt`` the number of the next start. ``state``: ``up`` (its process runs),
    ``moving`` (being ended, started, or pausing before a restart) or ``over`` (nothing more will be started).
    ``folder``: the trainer's working folder, which relative checkpoint paths start from. ``cannot``: why the run could not be
    started again, "" if it could. ``request_id``: the request that is ending ``attempt``. ``error``: why the process of
    ``attempt`` could not be started.
    """

    attempt: int
    next_attempt: int
    state: Literal["up", "moving", "over"]
    folder: str
    cannot: str = ""
    request_id: str | None = None
    error: str = ""


class Scheduler(Protocol):
    """Ends and starts the attempts of runs. All calls may be repeated; none blocks for longer than ten seconds."""

    def look(self, run: RunFolder) -> Situation:
        """Say how the run is.

        Raises:
            SchedulerError: nobody answers.
        """

    def frozen(self, run: RunFolder, attempt: int) -> AbstractContextManager[Situation]:
        """Keep the next attempt from starting during the block, so that a plan is written before it starts or not at all.

        Raises:
            StaleError: ``attempt`` is not the newest attempt.
            SchedulerError: nobody answers.
        """

    def restart(self, run: RunFolder, attempt: int, for_attempt: int, request_id: str) -> None:
        """Have every process of ``attempt`` ended and then ``for_attempt`` started. Returns at once.

        Raises:
            StaleError: ``attempt`` is not the newest attempt.
            SchedulerError: nobody answers, or the run is being ended otherwise.
        """

    def stop(self, run: RunFolder, attempt: int, request_id: str) -> None:
        """Have every process of ``attempt`` ended and nothing started. Returns at once. Raises as :meth:`restart`."""
