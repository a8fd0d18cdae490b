"""What a plan asks of the trainer itself, which alone can do it: whether it may evaluate. Reads alone, from the run's folder."""

from __future__ import annotations

from trainwarden.plan import Plan

from .notices import Notices
from .resume import Resume


class TellsPlans:
    """The part of an exporter that says what the plan of this attempt asks."""

    _notices: Notices

    def _read_resume(self) -> Resume:
        raise NotImplementedError

    @property
    def plan(self) -> Plan | None:
        """The plan that this attempt's line began with, None where it began without one; ``plan.probe`` is what it is to find out.

        The same on all ranks, and from the beginning of the attempt to its end. After a crash the next attempt of the line has it too.
        """
        try:
            return self._read_resume().line
        except Exception as error:
            self._notices.fault("reading the plan", error)
            return None

    @property
    def without_evaluation(self) -> bool:
        """Whether the plan wants this attempt to run without any evaluation: a probe tells so whether one breaks the run (case A39).

        A script looks before each: ``if step % 500 == 0 and not exporter.without_evaluation: evaluate()``.
        """
        plan = self.plan
        return plan is not None and plan.probe is not None and plan.probe.kind == "without_evaluation"
