"""The keeper: the small process between the supervisor and one trainer, which sees to it that no part of it survives.

One keeper lives as long as one attempt's process tree. It is the parent of the trainer and, as child subreaper, of every
orphan of the tree; it passes signals on and reports over a socket. When the trainer ends, when the supervisor asks, or
when the supervisor itself is gone, it ends every descendant and then itself. It never decides to start anything.

It runs as a program of its own (``python -m trainwarden.receiver.keeper CHANNEL LOCK``), so that a supervisor with threads
need not fork. Both arguments are inherited descriptors: the channel, and the locked file that the trainer holds open.
"""

from __future__ import annotations

import json
import os
import selectors
import signal
import socket
import subprocess
import sys
import time
from typing import Any

from . import processes

#: How often an ending tree is looked at, in seconds.
PACE = 0.1


class Keeper:
    """State of one keeper. The first message on the channel says what to start; see :meth:`_obey`."""

    def __init__(self, channel: socket.socket, lock: int) -> None:
        self._channel = channel
        self._lock = lock
        self._grace = 30.0
        self._mark = ""
        self._trainer: int | None = None
        self._ending: processes.Ending | None = None
        self._orphaned = False

    def run(self) -> int:
        """Serve until the tree is gone, and return the exit code."""
        wake, nudge = os.pipe()
        os.set_blocking(wake, False)
        os.set_blocking(nudge, False)
        signal.set_wakeup_fd(nudge)
        # Handlers, not SIG_IGN: what is ignored stays ignored in the trainer, what is handled is reset by exec.
        for number in (signal.SIGCHLD, signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2):
            if signal.getsignal(number) != signal.SIG_IGN:
                signal.signal(number, lambda *_: None)
        processes.become_subreaper()
        with selectors.DefaultSelector() as selector:
            selector.register(self._channel, selectors.EVENT_READ)
            selector.register(wake, selectors.EVENT_READ)
            while True:
                for key, _ in selector.select(PACE if self._ending else None):
                    if key.fileobj is self._channel:
                        if not self._read():
                            selector.unregister(self._channel)
                    elif signal.SIGTERM in os.read(wake, 4096):
                        self._end(signal.SIGTERM)
                self._reap()
                if self._ending and self._ending.step(time.monotonic()):
                    self._tell(gone=True, killed=len(self._ending.killed))
                    return 0

    def _read(self) -> bool:
        """Take one message; on the supervisor's end, begin the end of the tree and return False."""
        try:
            data = self._channel.recv(1 << 20)
        except OSError:
            data = b""
        if data:
            self._obey(json.loads(data))
            return True
        self._orphaned = True
        self._end(signal.SIGTERM)
        return False

    def _obey(self, message: dict[str, Any]) -> None:
        if "start" in message:
            self._grace = message["grace"]
            self._mark = message["mark"]
            self._start(message["start"], message["environment"])
        elif "signal" in message and self._trainer is not None:
            found = processes.identify(self._trainer)
            if found is not None:
                processes.send(found, message["signal"])
        elif "end" in message:
            self._end(message["end"])

    def _start(self, command: list[str], environment: dict[str, str]) -> None:
        me = os.getpid()
        try:
            # Its own session: signals of the terminal reach the supervisor alone, which passes them on once.
            trainer = subprocess.Popen(
                command,
                env=os.environ | environment,
                stdin=subprocess.DEVNULL,
                start_new_session=True,
                pass_fds=(self._lock,),
                preexec_fn=lambda: processes.die_with_parent(signal.SIGTERM, me),
            )
        except OSError as error:
            self._tell(failed=error.strerror or str(error), errno=error.errno)
            self._end(signal.SIGTERM)
            return
        self._trainer = trainer.pid
        trainer.returncode = 0  # it is reaped below, not by subprocess
        found = processes.identify(trainer.pid)
        self._tell(started=trainer.pid, start=found.start if found else 0)

    def _reap(self) -> None:
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return
            if pid == 0:
                return
            if pid == self._trainer:
                self._trainer = None
                self._tell(exited=os.waitstatus_to_exitcode(status))
                self._end(signal.SIGTERM)

    def _end(self, first: int) -> None:
        if self._ending is None:
            self._ending = processes.Ending(self._find, self._grace, time.monotonic(), first)

    def _find(self) -> tuple[dict[int, processes.Stat], set[processes.Process]]:
        table = processes.snapshot()
        me = os.getpid()
        found = processes.descendants(table, [me])
        if not found and self._mark:  # adopted by somebody else: a container's init, a subreaper in between
            found = processes.marked(table, self._mark)
        return table, processes.living(table, found - processes.ancestors(table, me))

    def _tell(self, **message: Any) -> None:
        if self._orphaned:
            return
        try:
            self._channel.send(json.dumps(message).encode())
        except OSError:
            pass  # the supervisor is gone: the channel's end says so too


def main(arguments: list[str]) -> int:
    """Keep one tree; both arguments are numbers of inherited descriptors."""
    channel, lock = map(int, arguments)
    return Keeper(socket.socket(fileno=channel), lock).run()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
