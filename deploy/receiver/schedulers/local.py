"""The local scheduler: ``trainwarden supervise`` on this machine, asked over the socket in the run's folder."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from trainwarden.receiver import control, locks, processes, state
from trainwarden.runfolder import RunFolder, RunFolderError

from .scheduler import SchedulerError, Situation, StaleError

#: How long to wait for the lock of starts, which is held for moments, in seconds.
LOCK_PATIENCE = 5.0


class LocalScheduler:
    """A :class:`~trainwarden.receiver.schedulers.scheduler.Scheduler`; holds no state."""

    def look(self, run: RunFolder) -> Situation:
        """Ask the supervisor; where it has ended for good, read what it left."""
        try:
            return _situation(self._ask(run, control.Command(op="look")).live)
        except SchedulerError:
            over = _over(run)
            if over is None:
                raise
            return over

    @contextlib.contextmanager
    def frozen(self, run: RunFolder, attempt: int) -> Iterator[Situation]:
        """Hold the lock that the supervisor takes to choose its next attempt."""
        with contextlib.ExitStack() as stack:
            try:
                stack.enter_context(locks.held(run.path / "start.lock", LOCK_PATIENCE))
            except OSError as error:  # TimeoutError is one
                raise SchedulerError(str(error)) from None
            situation = self.look(run)
            if situation.attempt != attempt:
                raise StaleError(f"attempt {situation.attempt} is the newest one, not {attempt}")
            yield situation

    def restart(self, run: RunFolder, attempt: int, for_attempt: int, request_id: str) -> None:
        """Ask the supervisor to end the tree and start the next attempt."""
        command = control.Command(op="restart", attempt=attempt, for_attempt=for_attempt, request_id=request_id)
        self._order(run, command)

    def stop(self, run: RunFolder, attempt: int, request_id: str) -> None:
        """Ask the supervisor to end the tree and itself."""
        self._order(run, control.Command(op="stop", attempt=attempt, request_id=request_id))

    def _order(self, run: RunFolder, command: control.Command) -> None:
        answer = self._ask(run, command)
        if answer.reason == "stale":
            live = answer.live
            raise StaleError(
                f"attempt {live.attempt} is the newest one, and the next start will be {live.next_attempt}"
            )
        if answer.reason:
            raise SchedulerError(f"the supervisor of {run.run} is {answer.reason}")

    def _ask(self, run: RunFolder, command: control.Command) -> control.Answer:
        try:
            return control.ask(run.path, command)
        except (OSError, ValueError) as error:
            raise SchedulerError(
                f"the supervisor of {run.run} does not answer at {run.path}: {error}; does the training run under "
                f"`trainwarden supervise --run {run.run}`?"
            ) from None


def _over(run: RunFolder) -> Situation | None:
    """Return the end of a run whose supervisor has finished, None if it was killed or still lives."""
    try:
        left = state.read_state(run)
    except (RunFolderError, OSError):
        return None
    if left is None or left.phase not in state.FINAL or processes.alive(left.supervisor):
        return None
    return Situation(
        attempt=left.attempt,
        next_attempt=left.attempt + 1,
        state="over",
        folder=left.folder,
        cannot=f"its supervisor has ended ({left.phase})",
        request_id=left.request_id,
        error=left.error,
    )


def _situation(live: control.Live) -> Situation:
    up = live.phase == "running"
    return Situation(
        attempt=live.attempt,
        next_attempt=live.next_attempt,
        state="up" if up else "over" if live.phase in state.FINAL else "moving",
        folder=live.folder,
        cannot=live.cannot,
        request_id=live.request_id,
        error=live.error,
    )
