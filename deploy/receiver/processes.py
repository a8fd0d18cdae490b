"""Processes as /proc shows them: who is alive, who descends from whom, who carries a mark; and how a tree is ended.

A process is named by its id *and* its start time, so that a reused id is never taken for the old process. Nothing
here waits or starts a process: an :class:`Ending` is stepped by whoever owns the loop. Standard library only.
"""

from __future__ import annotations

import ctypes
import os
import signal
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import NamedTuple

_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36
_libc = ctypes.CDLL(None, use_errno=True)


class Process(NamedTuple):
    """One process for ever: its id and the clock ticks after boot at which it started (field 22 of /proc/PID/stat)."""

    pid: int
    start: int


class Stat(NamedTuple):
    """What /proc/PID/stat says: parent, state letter and start time."""

    parent: int
    state: str
    start: int


def become_subreaper() -> None:
    """Make this process the parent of every descendant whose own parent ends (prctl(2) PR_SET_CHILD_SUBREAPER).

    Raises:
        OSError: the kernel refuses.
    """
    if _libc.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_CHILD_SUBREAPER)")


def die_with_parent(number: int, parent: int) -> None:
    """Have the kernel send ``number`` to this process when its parent ends. For use between fork and exec."""
    _libc.prctl(_PR_SET_PDEATHSIG, number, 0, 0, 0)
    if os.getppid() != parent:  # it ended before the call
        os.kill(os.getpid(), number)


def boot_id() -> str:
    """Return the id of this boot of the machine: start times of two boots cannot be compared."""
    return Path("/proc/sys/kernel/random/boot_id").read_text().strip()


def read_stat(pid: int) -> Stat | None:
    """Return a process's stat, or None if there is no such process."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:  # noqa: PTH123 - read thousands of times while a tree ends
            data = file.read()
    except (FileNotFoundError, ProcessLookupError, PermissionError):
        return None
    fields = data[data.rindex(b")") + 2 :].split()  # the name before it may hold spaces and parentheses
    return Stat(parent=int(fields[1]), state=fields[0].decode(), start=int(fields[19]))


def identify(pid: int) -> Process | None:
    """Return the process that has this id now, or None."""
    stat = read_stat(pid)
    return None if stat is None else Process(pid, stat.start)


def alive(process: Process) -> bool:
    """Say whether this very process still runs; a zombie does not."""
    stat = read_stat(process.pid)
    return stat is not None and stat.start == process.start and stat.state not in "ZX"


def snapshot() -> dict[int, Stat]:
    """Return all processes of the machine (or of this PID namespace)."""
    table = {}
    for name in os.listdir("/proc"):  # noqa: PTH208 - names are all that is needed
        if name.isdigit():
            stat = read_stat(int(name))
            if stat is not None:
                table[int(name)] = stat
    return table


def descendants(table: dict[int, Stat], roots: Iterable[int]) -> set[int]:
    """Return the ids of all children, grandchildren and so on of ``roots``, without the roots."""
    children: dict[int, list[int]] = {}
    for pid, stat in table.items():
        children.setdefault(stat.parent, []).append(pid)
    found: set[int] = set()
    queue = list(roots)
    while queue:
        for child in children.get(queue.pop(), ()):
            if child not in found:
                found.add(child)
                queue.append(child)
    return found


def ancestors(table: dict[int, Stat], pid: int) -> set[int]:
    """Return ``pid`` and its parents up to the first process: those that may never be ended from within."""
    found: set[int] = set()
    while pid in table and pid not in found:
        found.add(pid)
        pid = table[pid].parent
    return found


def marked(table: dict[int, Stat], mark: str) -> set[int]:
    """Return the ids of the processes that were started with ``mark`` (``NAME=value``) in their environment.

    Children inherit the mark through fork and exec, whatever session they open. A process that overwrites its own
    environment block (setproctitle does) hides it.
    """
    wanted = b"\0" + mark.encode() + b"\0"
    found = set()
    for pid in table:
        try:
            with open(f"/proc/{pid}/environ", "rb") as file:  # noqa: PTH123 - as in read_stat
                if wanted in b"\0" + file.read() + b"\0":
                    found.add(pid)
        except OSError:  # another user's, or gone
            continue
    return found


def holders(table: dict[int, Stat], path: Path) -> set[int]:
    """Return the ids of the processes that have the file at ``path`` open."""
    try:
        status = path.stat()
    except FileNotFoundError:
        return set()
    found = set()
    for pid in table:
        try:
            for entry in os.scandir(f"/proc/{pid}/fd"):
                other = entry.stat()
                if (other.st_dev, other.st_ino) == (status.st_dev, status.st_ino):
                    found.add(pid)
                    break
        except OSError:
            continue
    return found


def living(table: dict[int, Stat], pids: Iterable[int]) -> set[Process]:
    """Return those of ``pids`` that are no zombies, as processes."""
    return {Process(pid, table[pid].start) for pid in pids if pid in table and table[pid].state not in "ZX"}


def send(process: Process, number: int) -> None:
    """Signal exactly this process; do nothing if it is gone, or if its id belongs to another one by now."""
    try:
        descriptor = os.pidfd_open(process.pid)
    except ProcessLookupError:
        return
    try:
        if identify(process.pid) == process:
            signal.pidfd_send_signal(descriptor, number)
    except ProcessLookupError:
        return
    finally:
        os.close(descriptor)


class Ending:
    """The end of a process tree, in steps: ask its tops, then ask everybody, then kill, until nobody is left.

    A *top* is a process whose parent is not in the tree. The first signal goes to the tops alone, and to new tops as
    they come up: a trainer's own shutdown is not disturbed by the sudden death of its data loader workers, and
    torchrun tells its workers itself. After half of the grace SIGTERM goes to everybody who has had no signal, after
    all of it SIGKILL, again and again, to whoever is left or was born meanwhile.
    """

    def __init__(
        self, find: Callable[[], tuple[dict[int, Stat], set[Process]]], grace: float, now: float, first: int
    ) -> None:
        """``find`` returns a snapshot and who of it belongs to the tree; times are seconds of one monotonic clock."""
        self._find = find
        self._grace = grace
        self._begun = now
        self._first = first
        self._told: set[Process] = set()
        self._empty = 0
        self.killed: set[Process] = set()

    def step(self, now: float) -> bool:
        """Do what is due, and return True once two looks in a row found nobody. Call it about every 0.1 s."""
        table, left = self._find()
        if not left:
            self._empty += 1
            return self._empty >= 2  # a look can miss a process that is just being forked
        self._empty = 0
        pids = {process.pid for process in left}
        waited = now - self._begun
        for process in left:
            if waited >= self._grace:
                send(process, signal.SIGKILL)
                self.killed.add(process)
            elif process not in self._told:
                if table[process.pid].parent not in pids:
                    send(process, self._first)
                    self._told.add(process)
                elif waited >= self._grace / 2:
                    send(process, signal.SIGTERM)
                    self._told.add(process)
        return False
