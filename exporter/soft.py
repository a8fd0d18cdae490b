"""A lower learning rate for the running attempt: asked by a plan file, in effect from a named step on, back by itself.

Three threads have a part in it. The drain thread looks for the plan (:meth:`Soft.look`). The side group's lets the ranks agree
(:meth:`Soft.offer`, :meth:`Soft.agreed`). The training thread compares two numbers a step, and hooks the rate into the optimizers when the
step before the named one is closed (:meth:`Soft.closed`); it waits for nothing and reads no file.

Ranks must not differ: replicas that step at two rates are no replicas any more. So of several ranks none changes anything before all have
agreed, in two rounds of the side group whose result is the same on all: in the first each says which plan it has read and how many steps it
has left, in the second that it knows of the first. Whoever completes the second knows that all others know. Both must be over a
margin of steps before the named one; a rank that is later than that says so by offering nothing, and then nobody changes anything. Without a
side group ranks cannot agree, and nothing is done. What a rank learns too late after all is said, and the daemon compares the
ranks' own records.

A plan is of the start that reads it: one that lies in the folder when a start begins was for another, and what a start had lowered
ends with it. What is done is told in events ``lower_lr``; the records, not the events, prove it.
"""

from __future__ import annotations

import hashlib
import math
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from trainwarden.plan import Lowering, Plan
from trainwarden.runfolder import RunFolder

from .identity import Identity
from .notices import Notices
from .plans_watched import PlanWatch
from .resume_rate import Rate, Rates, has_no_rate, unwrapped

#: The kind of the events.
KIND = "lower_lr"
#: Seconds between two looks for a plan.
LOOK_SECONDS = 0.5
#: By when the ranks must have agreed: so many seconds before the named step, at the pace of the last ones, and at least so many steps.
#: The second round may come half as late.
MARGIN_SECONDS, MARGIN_STEPS = 4.0, 4
#: Rounds over which the pace is taken.
PACE_ROUNDS = 20
#: A step that is never reached.
NEVER = 2**63
#: What a rank offers that has read nothing.
NOTHING = (0.0, 0.0, 0.0, 0.0)


class Agrees(Protocol):
    """The side group, as far as it is needed here."""

    @property
    def open(self) -> bool:
        """Whether ranks may still agree."""


@dataclass(slots=True)
class _Asked:
    """A plan that was read. ``key`` names it among the ranks; ``cannot`` is why this rank could not carry it out.

    ``stage``: 1 once it was read, 2 once all ranks are known to have read it, 3 once all know that.
    """

    plan: Plan
    lowering: Lowering
    key: float
    cannot: str | None
    stage: int = 1


class Soft:
    """One per exporter. ``reached`` returns the last closed step; ``report`` records an event at a step with these fields.

    ``side`` is None where there is one rank, or where several cannot agree.
    """

    def __init__(
        self,
        folder: RunFolder,
        identity: Identity,
        optimizers: Sequence[torch.optim.Optimizer],
        reached: Callable[[], int],
        report: Callable[[int, dict[str, Any]], None],
        notices: Notices,
        side: Agrees | None,
    ) -> None:
        self._identity, self._optimizers = identity, list(optimizers)
        self._reached, self._report, self._notices = reached, report, notices
        self._side = side
        self._plans = PlanWatch(folder, notices)
        self._asked: _Asked | None = None
        self._next_look = 0.0
        self._pace: deque[tuple[float, int]] = deque(maxlen=PACE_ROUNDS)
        self._returning = False
        self._before = 0
        #: What multiplies the rates of this start; the exporter puts that of its resume here.
        self.rates = Rates()
        #: The training thread calls :meth:`closed` after each step that is not below it.
        self.armed = NEVER
        self._handled = self._there()

    def _there(self) -> set[str]:
        """Return the plans that lie there when the start begins: they were asked of another one. The resume says which it refuses."""
        try:
            return {plan.plan_id for plan in self._plans.news(quiet=True)}
        except (OSError, ValueError) as error:
            self._notices.fault("reading the plan folder", error)
            return set()

    # What the drain thread calls.

    def look(self) -> None:
        """Look for a plan, not more often than every half second."""
        now = time.monotonic()
        if now < self._next_look:
            return
        self._next_look = now + LOOK_SECONDS
        if self._side is not None and not self._side.open:
            self.ended()
        for plan in self._plans.news():
            lowering = plan.lowering
            if lowering is None or plan.for_attempt != self._identity.attempt or plan.plan_id in self._handled:
                continue
            self._handled.add(plan.plan_id)
            busy = self._asked
            if busy is not None:
                self._refuse(
                    plan, f"the rate is lowered already, by plan {busy.plan.plan_id} up to step {busy.lowering.end - 1}"
                )
            else:
                self._take(plan, lowering)

    def _take(self, plan: Plan, lowering: Lowering) -> None:
        cannot, left = self._cannot(), lowering.first_step - 1 - self._reached()
        if self._identity.world_size == 1:
            if cannot is None and left <= 0:
                cannot = f"it was read after step {self._reached()}: too late for step {lowering.first_step}"
            if cannot is not None:
                self._refuse(plan, cannot)
            else:
                self._asked = _Asked(plan, lowering, 0.0, None)
                self._arm(lowering)
        elif self._side is None or not self._side.open:
            self._refuse(plan, "the ranks cannot agree on it: there is no side group, or it is closed")
        else:
            name = f"{plan.plan_id} {lowering.first_step}".encode()
            key = float(1 + int.from_bytes(hashlib.sha256(name).digest()[:6], "big"))
            self._asked = _Asked(plan, lowering, key, cannot)

    def _cannot(self) -> str | None:
        """Say why this rank cannot change the rate of all its optimizers, or None."""
        found, unknown = unwrapped(self._optimizers)
        reasons = unknown + [why for optimizer in found if (why := has_no_rate(optimizer)) is not None]
        return "; ".join(reasons) or None

    # What the side group's thread calls, in each round.

    def offer(self) -> tuple[float, float, float, float]:
        """Return what this rank brings to the next round, of which the ranks' smallest are taken.

        The plan's key and its negative, the steps that are left, and how far this rank has come with it; nothing where it is too late.
        """
        reached = self._reached()
        self._pace.append((time.monotonic(), reached))
        asked = self._asked
        if asked is None or asked.stage == 3:
            return NOTHING
        margin = self._margin() if asked.stage == 1 else self._margin() // 2
        left = asked.lowering.first_step - 1 - reached - margin
        if left < 0:
            self._give_up(asked, f"not every rank had read it {margin} steps before step {asked.lowering.first_step}")
            return NOTHING
        return asked.key, -asked.key, float(left), float(asked.stage if asked.cannot is None else -1)

    def agreed(self, least: Sequence[float]) -> None:
        """Take the smallest of what all ranks have offered. The same on all of them, so that all come to the same."""
        asked = self._asked
        if asked is None or asked.stage == 3 or not least[0] == -least[1] == asked.key:
            return  # some rank has not read it yet, or none will carry it out any more
        if least[3] < 0:
            self._give_up(asked, asked.cannot or "another rank cannot change its learning rate")
        elif least[3] == asked.stage == 1:
            asked.stage = 2
        elif least[3] == asked.stage == 2:
            asked.stage = 3
            self._arm(asked.lowering)

    def ended(self) -> None:
        """The ranks agree on nothing any more: what they have not agreed on by now is not done."""
        asked = self._asked
        if asked is not None and asked.stage < 3:
            self._give_up(asked, "the side group was closed before the ranks had agreed")

    def _margin(self) -> int:
        """Return by how many steps the ranks must have agreed before the named one."""
        (began, first), (now, last) = self._pace[0], self._pace[-1]
        rate = (last - first) / (now - began) if now > began else 0.0
        return max(MARGIN_STEPS, math.ceil(MARGIN_SECONDS * rate))

    def _give_up(self, asked: _Asked, why: str) -> None:
        self._asked = None
        self._refuse(asked.plan, why)

    def _arm(self, lowering: Lowering) -> None:
        self.armed = lowering.first_step - 1

    # What the training thread calls.

    def closed(self, step: int) -> None:
        """Step ``step`` is closed, and it is time to do something. Raises nothing."""
        try:
            self._closed(step)
        except Exception as error:
            self.armed = NEVER
            self._notices.fault("lowering the learning rate", error)

    def _closed(self, step: int) -> None:
        asked = self._asked
        if asked is None:
            self.armed = NEVER
            return
        lowering = asked.lowering
        if step < lowering.first_step - 1:
            return
        if self.armed == lowering.first_step - 1:
            self._begin(asked, step)
        elif not self._returning and step >= lowering.returns - 1:
            self._hold_over(asked, step)
        elif self._returning and step >= lowering.end - 1:
            self._finish(asked, step)

    def _begin(self, asked: _Asked, step: int) -> None:
        lowering = asked.lowering
        if step >= lowering.first_step:
            others = (
                ""
                if self._identity.world_size == 1
                else ", though all ranks had agreed: others may have lowered theirs"
            )
            self._stop(asked, step, f"this rank had passed step {lowering.first_step} when it came to know{others}")
            return
        rates = self.rates
        if not rates.installed:
            rates.base = Rate()  # what no resume has put into effect does not begin now
        rates.lower(lowering)
        rates.install(unwrapped(self._optimizers)[0], step + 1)
        rates.closed(step)
        self._returning, self._before = False, rates.multiplied
        self._tell(asked.plan, step, state="began")
        self.armed = lowering.returns - 1

    def _hold_over(self, asked: _Asked, step: int) -> None:
        """The last step at the full lowering is closed."""
        lowering = asked.lowering
        if self.rates.multiplied == self._before:
            self.rates.let_go(lowering)
            self._stop(
                asked, step, "no optimizer step of these was seen: a replayed graph, or an optimizer that was replaced"
            )
        elif lowering.return_steps:
            self._returning = True
            self._tell(asked.plan, step, state="returns")
            self.armed = lowering.end - 1
        else:
            self._finish(asked, step)

    def _finish(self, asked: _Asked, step: int) -> None:
        updates = self.rates.multiplied - self._before
        self.rates.let_go(asked.lowering)
        self._asked, self.armed = None, NEVER
        self._tell(asked.plan, step, state="ended", updates=updates)

    def _stop(self, asked: _Asked, step: int, why: str) -> None:
        self._asked, self.armed = None, NEVER
        self._refuse(asked.plan, why, step)

    # What is told.

    def _refuse(self, plan: Plan, why: str, step: int | None = None) -> None:
        self._notices.say(f"lower_lr {plan.plan_id}", f"plan {plan.plan_id}: the learning rate is not lowered: {why}")
        self._tell(plan, self._reached() if step is None else step, state="not_applied", reason=why)

    def _tell(self, plan: Plan, step: int, **fields: Any) -> None:
        asked = {"factor": plan.lr_factor, "first_step": plan.at_step, "steps": plan.lr_steps}
        self._report(step, {"plan_id": plan.plan_id, **fields, **asked, "return_steps": plan.lr_return_steps})
