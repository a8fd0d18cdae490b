"""The side group: a gloo group of the exporter's own, over which the ranks add up what they saw. On a thread of its own.

No collective is ever issued on a group of the trainer's, and none on the training thread. The group is made beside torch's own
book-keeping, from a connection of its own to the process group's store: making it shifts the name of no group that the trainer
makes later, and ``destroy_process_group`` takes nothing away from it.

The ranks first agree through the store. A rank without an exporter, or with the side group off, keeps the others from making
it, not from training. From then on rounds are held at a steady pace, whether a rank has news or not: a rank that is slow delays
nobody, and only a process that is dead or stands still as a whole ends it. Each round: a minimum says how far all ranks have
drained; the steps up to there are reduced in one vector of a fixed length a step (sum, largest, and whose was the largest).
After the first failure the group is closed for good and each rank goes on with its own values; that is said once.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any, Protocol

import numpy as np
import torch
import torch.distributed as dist

from .across import Joined, Layout, Own, to_max, to_min, to_sum
from .notices import Notices

#: Seconds from round to round: while there are steps, and while the exporter is being closed.
ROUND_SECONDS, HURRY_SECONDS = 0.5, 0.01
#: Longest time for all ranks to make their exporters, and what is left between two looks whether they have.
JOIN_SECONDS, LOOK_SECONDS = 60.0, 0.05
#: Steps that are reduced in one round, and steps of a rank that may wait for the others'; beyond, the oldest are let go.
STEPS_OF_ROUND, STEPS_WAITING = 64, 4096
#: The version of what a round carries.
ROUNDS = 2
#: Longest time that leaving waits for the round that is under way.
LEAVE_SECONDS = 2.0


class Beside(Protocol):
    """Who has something to agree on beside the steps. Called on the group's thread; none of these may raise."""

    def offer(self) -> tuple[float, float, float, float]:
        """Return this rank's numbers for the next round."""

    def agreed(self, least: Sequence[float]) -> None:
        """Take the smallest of each over all ranks."""

    def ended(self) -> None:
        """There will be no further round."""


class Alone:
    """Nobody has."""

    def offer(self) -> tuple[float, float, float, float]:
        """Offer nothing."""
        return (0.0, 0.0, 0.0, 0.0)

    def agreed(self, least: Sequence[float]) -> None:
        """Pass over it."""

    def ended(self) -> None:
        """Pass over it."""


class SideGroup(threading.Thread):
    """One per rank. ``timeout`` (seconds) is how long a round waits for a rank; ``signature`` names the parameters trained here.

    ``weight`` is what this rank's shares count, None for one over the number of ranks that train the same parameters.
    ``on_joined`` is told how many ranks train the same parameters as this one, and whether all do.
    """

    def __init__(
        self,
        rank: int,
        world_size: int,
        key: str,
        layout: Layout,
        signature: str,
        timeout: float,
        notices: Notices,
        on_joined: Callable[[int, bool], None],
        weight: float | None = None,
    ) -> None:
        super().__init__(name="trainwarden-side", daemon=True)
        self._rank, self._world_size = rank, world_size
        self._key = _place(key, layout)
        self._layout = layout
        self._signature = signature
        self._timeout = timeout
        self._notices = notices
        self._on_joined = on_joined
        self._offered: deque[tuple[int, Own]] = deque()
        self._mine: dict[int, Own] = {}
        self._results: dict[int, Joined] = {}
        self._recorded = -1
        self._next = self._newest = -1
        self._given = weight
        self._weight = 1.0
        self._wake = threading.Event()
        self._closing = self._leaving = self._left = False
        self._group: Any = None
        #: Whether results may still come.
        self.open = True
        #: Who agrees on something beside the steps.
        self.beside: Beside = Alone()
        #: Told once why it is closed although the exporter is not, and after which step.
        self.on_closed: Callable[[int, str], None] = lambda step, reason: None
        #: Rounds that were held, and steps that were combined.
        self.rounds = self.combined = 0

    # What the drain thread calls.

    def offer(self, step: int, own: Own) -> None:
        """Hand in this rank's numbers of a step. Steps come in order. Never waits."""
        if self.open:
            self._offered.append((step, own))
        elif self._left:
            self._left = False
            reason = "another rank has closed its exporter"
            self._notices.say("side group", f"side group: {reason}: from here on each has its own values only")
            self.on_closed(max(self._next - 1, 0), reason)

    def awaits(self, step: int) -> bool:
        """Say whether the numbers of ``step`` are not there yet and may still come."""
        return self.open and self._next <= step and step not in self._results

    def take(self, step: int) -> Joined | None:
        """Return a step's numbers over all ranks, or None. They are handed out once, and none of an earlier step after it."""
        self._recorded = step
        return self._results.pop(step, None)

    def hurry(self) -> None:
        """Hold rounds without a pause from now on: the exporter is being closed."""
        self._closing = True
        self._wake.set()

    def leave(self) -> None:
        """End it for all ranks, once the round that is under way is over; wait a bounded time for that."""
        self._leaving = True
        self.hurry()
        if not self.is_alive():
            return
        # No longer: the round may wait for a rank that never comes, and the thread is a daemon.
        self.join(LEAVE_SECONDS)

    # The thread's own.

    def run(self) -> None:
        """Agree, make the group, hold rounds until the end or the first failure."""
        try:
            if self._join():
                while self._round():
                    self._wake.wait(HURRY_SECONDS if self._closing else ROUND_SECONDS)
        except Exception as error:
            if not self._closing:
                reason = _sentence(error)
                self._notices.say(
                    "side group",
                    f"side group: {reason}: it is closed, and each rank goes on with its own values (under sharding, global "
                    "norms are missing from here on)",
                )
                self.on_closed(max(self._next - 1, 0), reason)
        finally:
            self.open = False
            self.beside.ended()
            self._group = None
            self._mine.clear()
            self._offered.clear()

    def _join(self) -> bool:
        """Agree with the other ranks through the store and make the group; False where the exporter was closed before."""
        store: Any = dist.distributed_c10d._get_default_store()
        store = store.clone()
        end = time.monotonic() + JOIN_SECONDS
        same = f"{self._key}/{self._signature}"
        store.add(same, 1)
        if store.add(f"{self._key}/joined", 1) == self._world_size:
            store.set(f"{self._key}/verdict", "all")
        while not store.check([f"{self._key}/verdict"]):
            if self._leaving:
                return False
            if time.monotonic() > end:
                raise TimeoutError(
                    f"not all {self._world_size} ranks made an exporter of this version within {JOIN_SECONDS:g} s"
                )
            time.sleep(LOOK_SECONDS)
        verdict = store.get(f"{self._key}/verdict").decode()
        if verdict != "all":
            raise RuntimeError(verdict)
        alike = int(store.add(same, 0))
        self._group = self._connected(dist.distributed_c10d.PrefixStore(f"{self._key}/gloo", store))
        self._weight = 1.0 / alike if self._given is None else self._given
        self._on_joined(alike, alike == self._world_size)
        return True

    def _connected(self, store: Any) -> Any:
        """Return the group. Its reductions go round in a ring: each rank connects to its two neighbours, and to nobody else."""
        gloo: Any = dist.ProcessGroupGloo
        options = gloo._Options()
        options._devices = [gloo.create_default_device(lazy_init=True)]
        options._timeout = timedelta(seconds=self._timeout)
        return gloo(store, self._rank, self._world_size, options)

    def _round(self) -> bool:
        """Hold one round; False where it was the last."""
        self._collect()
        news = [float(self._newest), -float(self._next), float(self._closing), -float(self._leaving)]
        agreed = self._reduce(np.array([[*news, *self.beside.offer()]]), dist.ReduceOp.MIN)[0]
        self.beside.agreed([float(number) for number in agreed[len(news) :]])
        newest, begin, leaving = int(agreed[0]), -int(agreed[1]), agreed[3] < 0
        self._next = max(self._next, begin)
        count = min(newest - begin + 1, STEPS_OF_ROUND) if begin >= 0 else 0
        if count > 0:
            self._combine(begin, count)
            self._next = begin + count
        self._mine = {step: own for step, own in self._mine.items() if step >= self._next}
        for step in [step for step in tuple(self._results) if step <= self._recorded]:
            self._results.pop(step, None)
        self.rounds += 1
        if leaving:
            self._left = not self._closing
        return not leaving

    def _collect(self) -> None:
        """Take over what the drain thread has handed in."""
        while self._offered:
            step, own = self._offered.popleft()
            if self._next < 0:
                self._next = step
            self._newest = max(self._newest, step)
            self._mine[step] = own
            if len(self._mine) > STEPS_WAITING:
                del self._mine[next(iter(self._mine))]

    def _combine(self, begin: int, count: int) -> None:
        nothing = self._layout.own({}, {})
        own = [self._mine.get(step, nothing) for step in range(begin, begin + count)]
        sums = self._reduce(to_sum(own, self._weight), dist.ReduceOp.SUM)
        largest = self._reduce(to_max(own), dist.ReduceOp.MAX)
        argmax = self._reduce(to_min(own, sums, largest, self._rank), dist.ReduceOp.MIN)
        for row in range(count):
            if begin + row in self._mine:
                self._results[begin + row] = self._layout.joined(sums[row], largest[row], argmax[row], self._world_size)
                self.combined += 1

    def _reduce(self, array: np.ndarray, operation: Any) -> np.ndarray:
        """Return the array reduced over all ranks. Waits with the interpreter's lock released."""
        options = dist.AllreduceOptions()
        options.reduceOp = operation
        tensor = torch.from_numpy(array)
        self._group.allreduce([tensor], options).wait()
        return array


def decline(key: str, layout: Layout, why: str) -> None:
    """Tell the other ranks at once that this one takes no part: they need not wait for it."""
    store = dist.distributed_c10d._get_default_store()
    store.set(f"{_place(key, layout)}/verdict", why)


def _place(key: str, layout: Layout) -> str:
    """Return where in the store the ranks of a start meet; those of a version with other rounds have another place."""
    return f"trainwarden/side/{ROUNDS}/{key}/{layout.digest()}"


def _sentence(error: Exception) -> str:
    """Return the first line of an error's text; gloo's begin with a file of its sources, in brackets."""
    line = (str(error) or type(error).__name__).strip().splitlines()[0]
    return line.split("] ", 1)[1] if line.startswith("[/") and "] " in line else line
