"""The resume side: reads what the run's folder says this attempt must do, and does it to the optimizers.

Reading raises nothing: what is wrong becomes a notice, and the run begins as well as it can. Nothing is asked of anybody;
the plan directory is all there is. The records, not this report, prove what was done.
"""

from __future__ import annotations

import socket
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from trainwarden.plan import Applied, CloseLook, Ledger, Plan, PlanError, Probe, Target
from trainwarden.runfolder import RunFolder, RunFolderError

from .checkpoints import catalogue
from .loader.skips import Excluded, Skip, Skips
from .loader.watched import WatchedLoader
from .resume_rate import Rate, Rates, has_no_rate, unwrapped
from .resume_reset import cannot_reset, reset, warm_up_floor
from .target import choose, executed


class Resume:
    """What one attempt of a run resumes from and with.

    ``target`` is the checkpoint to load, None for a beginning from scratch. ``plan`` is the plan in force for this attempt.
    ``skips`` are those of every executed plan up to this attempt. ``notices`` are sentences for the start event.
    """

    def __init__(self, attempt: int) -> None:
        self.attempt = attempt
        self.target: Target | None = None
        self.plan: Plan | None = None
        self.skips = Skips()
        self.notices: list[str] = []
        self._line: Plan | None = None
        #: What multiplies the learning rate in this start.
        self.rates = Rates()
        self._optimizers: list[torch.optim.Optimizer] = []
        self._applied: Applied | None = None

    @classmethod
    def read(cls, folder: RunFolder, attempt: int, roots: list[Path] | None = None) -> Resume:
        """Read the run's plans, ledger and journals. Touches nothing and never raises.

        ``roots`` are the folders inside which checkpoints may lie; None allows any.
        """
        resume = cls(attempt)
        plans: list[Plan] = []
        ledger = Ledger(run_uid="")
        checkpoints = []
        try:
            plans, refused = folder.read_plans()
            resume.notices += [f"plan refused: {sentence}" for sentence in refused]
        except (RunFolderError, OSError) as error:
            resume.notices.append(f"plans not read: {error}")
        try:
            found = folder.ledger()
            identity = folder.identity()
            if found is not None and identity is not None and found.run_uid != identity.run_uid:
                resume.notices.append(f"ledger not used: {folder.path / 'ledger.json'} is of run {found.run_uid}")
            elif found is not None:
                ledger = found
        except (PlanError, RunFolderError, OSError) as error:
            resume.notices.append(f"ledger not read, so what it alone knows is not skipped: {error}")
        try:
            checkpoints = catalogue(folder)
        except (OSError, ValueError) as error:
            resume.notices.append(f"journals not read, so their checkpoints are not known: {error}")
        try:
            known = executed(plans, ledger, attempt)
            resume.skips = _skips(known)
            choice = choose(plans, known, checkpoints, attempt, roots)
            resume.target, resume.plan, resume._line = choice.target, choice.plan, choice.line
            resume.notices += choice.notices
        except Exception as error:  # a fault of our own must not keep a run from starting
            resume.notices.append(f"nothing chosen to resume from: {type(error).__name__}: {error}")
        if resume._line is not None and resume.plan is None and _changes_rate(resume._line):
            resume.rates.base = _rate(resume._line, resume._line.target)
        return resume

    def apply(
        self, optimizers: Sequence[Any] | Any, start_step: int, loader: WatchedLoader | None = None
    ) -> Applied | None:
        """Reset the optimizers and install the learning rate's hooks, once, after the checkpoint was loaded.

        ``start_step`` is the number that the first record will carry; ``loader`` the watched loader, which knows what it
        skips. Returns the report for the start event, or None where no plan is in force. Never raises: what could
        not be done is in ``not_applied``.
        """
        if self._applied is not None:
            return self._applied
        refused: dict[str, str] = {}
        self._optimizers, unknown = unwrapped(optimizers)
        plan = self.plan
        if plan is None:
            if self._line is not None and self.rates.base.changes:
                self._install(start_step, unknown, refused)
                self.notices.append(
                    f"plan {self._line.plan_id}: its learning rate factor and what is left of its ramp go on from the checkpoint"
                )
                self.notices += [f"{name}: {reason}" for name, reason in refused.items()]
            return None
        was_reset = plan.reset_optimizer and self._reset(unknown, refused)
        warm_up = plan.rewarmup_steps
        if was_reset:
            floor = warm_up_floor(self._optimizers)
            if warm_up < floor:
                self.notices.append(
                    f"re-warm-up raised from {warm_up} to {floor} steps: after a reset Adam moves every element by a whole "
                    "learning rate until its first moment has filled"
                )
                warm_up = floor
        began = start_step - 1
        if self.target is not None and self.target.step != began:
            refused["target"] = (
                f"the trainer goes on at step {start_step}, the target {self.target.path} at {self.target.step + 1}"
            )
        elif self.target != plan.target:
            refused["target"] = "it cannot be loaded; see the notices"
        self.rates.base = Rate(factor=plan.lr_factor, warm_up=warm_up, began=began)
        if self.rates.base.changes and not self._install(start_step, unknown, refused):
            warm_up = 0
        _ask_loader(plan, loader, refused)
        host = socket.gethostname()
        if host in plan.exclude_hosts:
            refused["exclude_hosts"] = f"the run was started on {host}"
        self._applied = Applied(
            plan_id=plan.plan_id,
            start_step=start_step,
            target=self.target,
            reset_optimizer=was_reset,
            lr_factor=1.0 if "lr_factor" in refused else plan.lr_factor,
            rewarmup_steps=warm_up,
            skip_samples=[] if "skip_samples" in refused else plan.skip_samples,
            exclude=[] if "exclude" in refused else plan.exclude,
            anomaly=_still_to_come(plan.anomaly, start_step, refused),
            probe=_askable(plan.probe, start_step, refused),
            not_applied=refused,
        )
        return self._applied

    @property
    def line(self) -> Plan | None:
        """The newest plan executed so far, in force or overtaken by a checkpoint of its line."""
        return self._line

    def left_undone(self) -> str | None:
        """Say what an attempt that nobody watches leaves out of the plan, or None. Its target and skips hold all the same."""
        if self.plan is not None:
            asked = "its reset, learning rate factor, ramp and close look are not applied; its target and skips hold"
            return f"plan {self.plan.plan_id} is in force: {asked}"
        if self._line is not None and self.rates.base.changes:
            return f"plan {self._line.plan_id}: what is left of its learning rate factor and ramp is not applied"
        return None

    def lr_factor(self, step: int) -> float:
        """Return what the scheduled learning rate is multiplied by at a global step: ramp times factor."""
        return self.rates.at(step)

    def closed(self, step: int) -> None:
        """Tell the hooks that global step ``step`` has ended, so that steps without an optimizer step count, too.

        Whoever does not call this has one optimizer step counted as one global step.
        """
        self.rates.closed(step)

    def remove(self) -> None:
        """Take the hooks off the optimizers."""
        self.rates.remove()

    def _reset(self, unknown: list[str], refused: dict[str, str]) -> bool:
        """Reset all optimizers or, where one of them cannot be, none."""
        reasons = unknown + [why for optimizer in self._optimizers if (why := cannot_reset(optimizer)) is not None]
        if not reasons and self._optimizers:
            try:
                for optimizer in self._optimizers:
                    reset(optimizer)
                return True
            except Exception as error:  # an optimizer of another kind than it looks
                reasons.append(f"{type(error).__name__}: {error}")
        refused["reset_optimizer"] = "; ".join(reasons) or "there is no optimizer"
        return False

    def _install(self, start_step: int, unknown: list[str], refused: dict[str, str]) -> bool:
        """Hook the rate into every optimizer that has one; name in ``refused`` what that leaves undone."""
        found = [(optimizer, has_no_rate(optimizer)) for optimizer in self._optimizers]
        self.rates.install([optimizer for optimizer, why in found if why is None], start_step)
        reasons = unknown + [why for _, why in found if why is not None]
        if reasons or not self.rates.installed:
            why = "; ".join(reasons) or "there is no optimizer"
            base = self.rates.base
            asked = {"lr_factor": base.factor != 1.0, "rewarmup_steps": base.warm_up > 0}
            refused.update({name: why for name, is_asked in asked.items() if is_asked})
        if not self.rates.installed:
            self.rates.base = Rate()
        return self.rates.installed


def _still_to_come(look: CloseLook | None, start_step: int, refused: dict[str, str]) -> CloseLook | None:
    """Return what of a close look this attempt has before it; where that is nothing, name it in ``refused``."""
    if look is None:
        return None
    if look.end <= start_step:
        refused["anomaly"] = (
            f"steps {look.first_step} to {look.end - 1} lie before step {start_step}, the first of this attempt"
        )
        return None
    first = max(look.first_step, start_step)
    return CloseLook(first_step=first, steps=look.end - first, check_nan=look.check_nan)


def _askable(probe: Probe | None, start_step: int, refused: dict[str, str]) -> Probe | None:
    """Return the probe where its first step is still to come; else name it in ``refused``."""
    if probe is not None and start_step > probe.first_step:
        refused["probe"] = f"it asks about step {probe.first_step}, and this attempt begins at step {start_step}"
        return None
    return probe


def _changes_rate(plan: Plan) -> bool:
    return plan.lr_factor != 1.0 or plan.rewarmup_steps > 0


def _rate(plan: Plan, target: Target | None) -> Rate:
    return Rate(factor=plan.lr_factor, warm_up=plan.rewarmup_steps, began=target.step if target else 0)


def _skips(ledger: Ledger) -> Skips:
    skips = [
        Skip(entry.skip_epoch, entry.skip_samples, entry.skip_mode) for entry in ledger.entries if entry.skip_samples
    ]
    excluded = [Excluded(what, entry.skip_mode) for entry in ledger.entries for what in entry.exclude]
    return Skips(tuple(skips), tuple(excluded))


def _ask_loader(plan: Plan, loader: WatchedLoader | None, refused: dict[str, str]) -> None:
    """Add what the loader could not carry out of this plan's skips and exclusions."""
    asked = {"skip_samples": bool(plan.skip_samples), "exclude": bool(plan.exclude)}
    if loader is None:
        for name, is_asked in asked.items():
            if is_asked:
                refused[name] = "no loader is wrapped: exporter.wrap(loader) is what carries out skips"
        return
    # The loader speaks of all plans so far; this one asked for substitution or it did not.
    asked["skip_mode"] = plan.skip_mode == "substitute" and any(asked.values())
    for name, reason in loader.refused.items():
        if asked.get(name):
            refused[name] = reason
