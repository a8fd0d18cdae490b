"""The supervisor's loop: one thread, one selector, one state file.

An attempt goes through the phases of :mod:`state`: *clearing* (nobody of an old tree is left, the trainer's lock is
free), *starting* (number chosen and on disk), *running*, *ending*, and again. :meth:`Supervisor._decide` is the only place
that says what comes after an attempt.
"""

from __future__ import annotations

import hashlib
import json
import os
import selectors
import shutil
import signal
import socket
import subprocess
import sys
import time
from typing import Any

from trainwarden.plan import RESTARTING_ACTIONS, PlanError
from trainwarden.runfolder import RunFolder, RunFolderError

from . import locks, processes, restarts
from .control import Answer, Command, Desk, Live
from .readiness import notify
from .state import Phase, State, write_state

#: Signals that end the run: passed on to the trainer, no restart after them.
ENDING = (signal.SIGTERM, signal.SIGINT, signal.SIGQUIT)
#: Signals that are passed on and mean what the trainer makes of them. If it dies of one, there is no restart either.
PASSED = (signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2, signal.SIGCONT, signal.SIGWINCH)
#: Exit code after a stop by request: not 0, which a job script reads as "done", and not one of a shell's.
STOPPED = 3
#: The environment variable that marks a tree.
MARK = "TRAINWARDEN_SUPERVISOR_ID"
#: How often the loop looks around while something is due, and how much longer than its grace a keeper may take, in seconds.
PACE = 0.05
SLACK = 10.0


def tree_mark(run: RunFolder, run_uid: str) -> str:
    """Return the value of the mark: the same for every supervisor of this folder, for no other folder (not even a copy)."""
    return hashlib.sha256(f"{run_uid}\n{run.path.resolve()}".encode()).hexdigest()[:32]


def passed_through(code: int) -> int:
    """Return the exit code that shells use: 128 + n for signal n (given as -n)."""
    return 128 - code if code < 0 else code


class Supervisor:
    """One supervisor's life. ``before`` is the state that the last supervisor of this run left."""

    def __init__(
        self, run: RunFolder, run_uid: str, command: list[str], grace: float, max_restarts: int, before: State | None
    ) -> None:
        self._run = run
        self._run_uid = run_uid
        self._max_restarts = max_restarts
        self._mark = tree_mark(run, run_uid)
        me = processes.identify(os.getpid())
        assert me is not None
        self._state = State(
            boot=processes.boot_id(),
            host=socket.gethostname(),
            supervisor=me,
            command=command,
            folder=os.getcwd(),  # noqa: PTH109
            grace=grace,
        )
        self._before: list[processes.Process] = []
        self._old_keeper: processes.Process | None = None
        if before is not None:
            self._state.attempt = before.attempt
            self._state.plan_id = before.plan_id
            if before.stop and before.phase != "stopped":  # it died while it was stopping the run: finish that
                self._state.stop, self._state.request_id = True, before.request_id
            if before.boot == self._state.boot and before.host == self._state.host:
                self._old_keeper = before.keeper
                self._before = [process for process in (before.keeper, before.trainer) if process is not None]
        self._selector = selectors.DefaultSelector()
        self._keeper: subprocess.Popen[bytes] | None = None
        self._channel: socket.socket | None = None
        self._lock: int | None = None
        self._ending: processes.Ending | None = None
        self._clearing_since = time.monotonic()
        self._search_holders = False
        self._begun: float | None = None  # when this supervisor's newest attempt was launched
        self._first = True
        self._exit: int | None = None
        self._due: float | None = None
        self._signal: int | None = None
        self._forwarded: set[int] = set()
        self._result: int | None = None

    # ---------------------------------------------------------------- the loop

    def run(self) -> int:
        """Supervise until the run is over, and return the exit code."""
        processes.become_subreaper()
        wake, nudge = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        for handled in (*ENDING, *PASSED, signal.SIGCHLD):
            # Under nohup SIGHUP stays ignored; an ignored SIGCHLD would hide the ends of children.
            if handled == signal.SIGCHLD or signal.getsignal(handled) != signal.SIG_IGN:
                signal.signal(handled, lambda *_: None)
        signal.set_wakeup_fd(nudge, warn_on_full_buffer=False)
        self._selector.register(wake, selectors.EVENT_READ)
        self._save()
        desk = Desk(self._run.path, self._selector)
        try:
            while self._result is None:
                for key, _ in self._selector.select(None if self._state.phase == "running" else PACE):
                    if key.fileobj is self._channel:
                        self._hear()
                    elif key.data is desk:
                        assert isinstance(key.fileobj, socket.socket)
                        desk.serve(key.fileobj, self._answer)
                    else:
                        for number in os.read(wake, 4096):
                            self._pass_on(number)
                self._reap()
                self._advance(time.monotonic())
            return self._result
        finally:
            desk.close()
            signal.set_wakeup_fd(-1)
            os.close(wake)
            os.close(nudge)
            self._selector.close()

    def _advance(self, now: float) -> None:
        phase = self._state.phase
        if phase == "clearing":
            if self._clear(now):
                self._decide(now)
        elif phase == "starting" and self._keeper is None:  # a receiver held the lock of starts
            self._decide(now)
        elif phase == "waiting":
            asked = self._state.request_id is not None or self._signal is not None
            if asked or (self._due is not None and now >= self._due):
                self._decide(now)

    # ---------------------------------------------------------------- between two attempts

    def _clear(self, now: float) -> bool:
        """End what is left of earlier trees, take the trainer's lock, and return True once both is done."""
        waited = now - self._clearing_since
        limit = self._state.grace + SLACK
        if self._old_keeper is not None and processes.alive(self._old_keeper) and waited < limit:
            return False  # the predecessor's keeper has seen it die and is ending the tree: one SIGTERM is enough
        if self._ending is None:
            self._ending = processes.Ending(self._survivors, self._state.grace, now, signal.SIGTERM)
        if not self._ending.step(now):
            if waited > 2 * limit + SLACK:
                self._finish(
                    "failed", 1, "processes of an earlier attempt cannot be ended; nothing is started beside them"
                )
            return False
        if self._lock is None:
            self._lock = locks.take(self._run.path / "trainer.lock")
        if self._lock is None:
            # Somebody of the old tree has shed the mark, or holds the lock on another host.
            self._search_holders, self._ending = True, None
            if waited > 2 * limit + SLACK:
                self._finish(
                    "failed", 1, f"{self._run.path / 'trainer.lock'} is held by a trainer that is not on this host"
                )
            return False
        self._before, self._old_keeper, self._ending, self._search_holders = [], None, None, False
        return self._result is None

    def _survivors(self) -> tuple[dict[int, processes.Stat], set[processes.Process]]:
        table = processes.snapshot()
        me = os.getpid()
        old = {p.pid for p in self._before if p.pid in table and table[p.pid].start == p.start}
        found = processes.descendants(table, [me, *old]) | old
        found |= processes.marked(table, f"{MARK}={self._mark}")
        if self._search_holders:
            found |= processes.holders(table, self._run.path / "trainer.lock")
        return table, processes.living(table, found - processes.ancestors(table, me))

    def _decide(self, now: float) -> None:
        """Say what comes next, with nothing of an earlier attempt left."""
        state, code = self._state, self._exit
        if state.stop:
            self._finish("stopped", STOPPED, f"attempt {state.attempt} stopped by request {state.request_id}")
        elif self._signal is not None:
            self._finish("interrupted", passed_through(code if code is not None else -self._signal), "ended by signal")
        elif state.request_id is not None or self._begun is None or state.phase in ("waiting", "starting"):
            state.phase = "starting"
            self._choose()
        elif code == 0:
            self._finish("finished", 0, f"attempt {state.attempt} finished")
        elif code is not None and -code in self._forwarded:
            self._finish("interrupted", passed_through(code), f"ended by signal {-code}, which was passed on to it")
        else:
            self._crashed(now, 1 if code is None else code)

    def _crashed(self, now: float, code: int) -> None:
        state = self._state
        assert self._begun is not None
        if restarts.made_progress(self._run, state.attempt, now - self._begun):
            state.restarts = 0
        what = state.error or f"ended with {passed_through(code)}"
        if state.error and self._first:
            self._finish("failed", code, f"attempt {state.attempt}: {what}")
        elif state.restarts >= self._max_restarts:
            times = f"after {state.restarts} restart{'s' * (state.restarts != 1)} without progress"
            self._finish("failed", passed_through(code), f"attempt {state.attempt} {what}; giving up {times}")
        else:
            state.restarts += 1
            pause = restarts.pause_before(state.restarts)
            self._due = now + pause
            state.phase = "waiting"
            self._save()
            self._say(
                f"attempt {state.attempt} {what}; restart {state.restarts} of {self._max_restarts} in {pause:g} s"
            )

    def _choose(self) -> None:
        """Choose the next attempt's number and start it, unless a receiver is writing a plan at this moment."""
        state = self._state
        start = locks.take(self._run.path / "start.lock")
        if start is None:
            return
        try:
            attempt = self._next_attempt()
            self._first = self._begun is None  # a command that never could be started is wrong, not unlucky
            state.attempt, state.plan_id = attempt, self._plan_for(attempt)
            state.phase, state.request_id, state.error, state.keeper, state.trainer = "starting", None, "", None, None
            self._exit, self._due, self._forwarded = None, None, set()
            self._save()
        finally:
            os.close(start)
        self._launch()

    def _next_attempt(self) -> int:
        return max([self._state.attempt, *self._run.attempts()]) + 1

    def _plan_for(self, attempt: int) -> str | None:
        try:
            plans, refused = self._run.read_plans()
        except (RunFolderError, OSError) as error:
            plans, refused = [], [str(error)]
        for says in refused:
            self._say(f"plan ignored: {says}")
        return next((p.plan_id for p in plans if p.for_attempt == attempt and p.action in RESTARTING_ACTIONS), None)

    def _excluded(self) -> list[str]:
        """Return the hosts that plans so far leave out, each once."""
        try:
            ledger = self._run.ledger()
        except (PlanError, OSError) as error:
            self._say(f"hosts to leave out are not known: {error}")
            return []
        entries = [] if ledger is None else ledger.entries
        return list(dict.fromkeys(host for entry in entries for host in entry.exclude_hosts))

    # ---------------------------------------------------------------- one attempt

    def _launch(self) -> None:
        state = self._state
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        assert self._lock is not None
        self._begun = time.monotonic()
        try:
            self._keeper = subprocess.Popen(
                [sys.executable, "-P", "-m", "trainwarden.receiver.keeper", str(theirs.fileno()), str(self._lock)],
                pass_fds=(theirs.fileno(), self._lock),
                # What systemd is told of this service, the supervisor tells.
                env={name: value for name, value in os.environ.items() if name != "NOTIFY_SOCKET"},
                stdin=subprocess.DEVNULL,
                start_new_session=True,
            )
        except OSError as error:
            ours.close()
            state.error = f"could not be started: {error.strerror}"
            self._attempt_is_over()
            return
        finally:
            theirs.close()
            os.close(self._lock)  # the tree holds it from here on, and it alone
            self._lock = None
        self._channel = ours
        self._selector.register(ours, selectors.EVENT_READ)
        environment = {
            "TRAINWARDEN_DIR": str(self._run.path.parent),
            "TRAINWARDEN_RUN": self._run.run,
            "TRAINWARDEN_ATTEMPT": str(state.attempt),
            "TRAINWARDEN_EXCLUDE_HOSTS": ",".join(self._excluded()),
            MARK: self._mark,
        }
        self._tell(start=state.command, environment=environment, grace=state.grace, mark=f"{MARK}={self._mark}")
        state.keeper = processes.identify(self._keeper.pid)
        self._save()

    def _hear(self) -> None:
        """Take one message of the keeper."""
        assert self._channel is not None
        try:
            data = self._channel.recv(65536)
        except OSError:
            data = b""
        if not data:
            self._selector.unregister(self._channel)
            self._channel.close()
            self._channel = None
            return
        message: dict[str, Any] = json.loads(data)
        state = self._state
        if "started" in message:
            state.trainer = processes.Process(message["started"], message["start"])
            if state.phase == "starting":
                state.phase = "running"
            self._save()
            notify("READY=1")
            plan = f" with plan {state.plan_id}" if state.plan_id else ""
            self._say(f"attempt {state.attempt} started{plan}, pid {state.trainer.pid}")
        elif "failed" in message:
            state.error = f"could not be started: {state.command[0]}: {message['failed']}"
            self._exit = 127 if message["errno"] == 2 else 126
            state.phase = "ending"
        elif "exited" in message:
            self._exit = message["exited"]
            state.phase = "ending"
            self._save()
        elif message.get("killed"):
            self._say(f"attempt {state.attempt}: {message['killed']} process(es) had to be killed")

    def _reap(self) -> None:
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return
            if pid == 0:
                return
            if self._keeper is not None and pid == self._keeper.pid:
                self._keeper.returncode = os.waitstatus_to_exitcode(status)
                while self._channel is not None:  # what it said before its end
                    self._hear()
                if self._keeper.returncode != 0:
                    self._say(f"attempt {self._state.attempt}: its keeper died ({self._keeper.returncode})")
                self._keeper = None
                self._attempt_is_over()
            elif self._state.trainer is not None and pid == self._state.trainer.pid and self._exit is None:
                self._exit = os.waitstatus_to_exitcode(status)  # its keeper died first, and it became ours

    def _attempt_is_over(self) -> None:
        self._state.phase = "clearing"
        self._state.last_exit = self._exit
        self._clearing_since = time.monotonic()
        self._save()

    # ---------------------------------------------------------------- what is asked of it

    def _pass_on(self, number: int) -> None:
        if number in ENDING:
            first, self._signal = self._signal is None, number
            self._say(f"{signal.Signals(number).name}: ending the run")
            if first:
                self._end(number)
            else:
                self._tell(signal=number)
        elif number in PASSED:
            self._forwarded.add(number)
            self._tell(signal=number)

    def _end(self, number: int = signal.SIGTERM) -> None:
        if self._keeper is not None:
            self._state.phase = "ending"
            self._tell(end=number)

    def _answer(self, command: Command) -> Answer:
        state = self._state
        if command.op == "look":
            return Answer(live=self._live())
        if self._signal is not None:
            return Answer(live=self._live(), reason="stopping")
        if command.attempt != state.attempt or (
            command.op == "restart" and command.for_attempt != self._next_attempt()
        ):
            return Answer(live=self._live(), reason="stale")
        if state.request_id is not None:
            return Answer(live=self._live(), reason="" if state.request_id == command.request_id else "busy")
        # On disk before anything is ended: a supervisor that is killed in between is followed by one that knows.
        state.request_id, state.stop = command.request_id, command.op == "stop"
        self._save()
        verb = "stop" if state.stop else f"restart as attempt {command.for_attempt}"
        self._say(f"request {command.request_id}: ending attempt {state.attempt} to {verb}")
        self._end()
        return Answer(live=self._live())

    def _live(self) -> Live:
        state = self._state
        cannot = ""
        if self._signal is not None or state.stop:
            cannot = "the run is being ended"
        elif not os.path.isdir(state.folder):  # noqa: PTH112
            cannot = f"the trainer's working folder {state.folder} is gone"
        elif shutil.which(state.command[0]) is None:
            cannot = f"{state.command[0]} cannot be run any more"
        return Live(
            run_uid=self._run_uid,
            attempt=state.attempt,
            next_attempt=self._next_attempt(),
            phase=state.phase,
            folder=state.folder,
            plan_id=state.plan_id,
            request_id=state.request_id,
            cannot=cannot,
            error=state.error,
        )

    # ---------------------------------------------------------------- saying and saving

    def _tell(self, **message: Any) -> None:
        if self._channel is not None:
            try:
                self._channel.send(json.dumps(message).encode())
            except OSError:
                pass  # the keeper is gone; its end is handled where it is reaped

    def _finish(self, phase: Phase, code: int, says: str) -> None:
        self._state.phase = phase
        self._result = code
        self._save()
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None
        self._say(says)

    def _save(self) -> None:
        try:
            write_state(self._run, self._state)
        except OSError as error:
            # The trainer and its lock are what counts; the folder's attempts still number the next start.
            self._say(f"cannot write {self._run.path / 'supervisor.json'}: {error.strerror}")

    def _say(self, text: str) -> None:
        try:
            print(f"trainwarden supervise: {self._run.run}: {text}", file=sys.stderr, flush=True)
        except OSError:
            pass  # a full or closed standard error never stops the run
