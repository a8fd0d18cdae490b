"""Chooses what an attempt resumes from: the plan's checkpoint, or the newest one that may be loaded. Pure but for looking at files.

A plan's target, reset and ramp hold for its attempt and for later ones until one of these has a checkpoint of its own.
Checkpoints of an abandoned line are never chosen, whoever wrote them and whenever.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from trainwarden.plan import RESTARTING_ACTIONS, Ledger, LedgerEntry, Plan, Target
from trainwarden.runfolder import in_quarantine

from .checkpoints import Checkpoint


@dataclass(slots=True)
class Choice:
    """``plan`` is the plan in force, ``line`` the newest one executed so far, in force or already overtaken by a checkpoint."""

    target: Target | None = None
    plan: Plan | None = None
    line: Plan | None = None
    notices: list[str] = field(default_factory=list)


def executed(plans: Sequence[Plan], ledger: Ledger, attempt: int) -> Ledger:
    """Return the ledger up to ``attempt``, with the entry of any rollback or probe that its writer was not able to add."""
    entries = [entry for entry in ledger.entries if entry.for_attempt <= attempt]
    known = {entry.plan_id for entry in entries}
    for plan in plans:
        if plan.action in RESTARTING_ACTIONS and plan.for_attempt <= attempt and plan.plan_id not in known:
            entries.append(
                LedgerEntry(
                    plan_id=plan.plan_id,
                    for_attempt=plan.for_attempt,
                    target_step=plan.target.step if plan.target else 0,
                    skip_samples=plan.skip_samples,
                    skip_epoch=plan.skip_epoch,
                    exclude=plan.exclude,
                    skip_mode=plan.skip_mode,
                    exclude_hosts=plan.exclude_hosts,
                )
            )
    return Ledger(run_uid=ledger.run_uid, entries=sorted(entries, key=lambda entry: entry.for_attempt))


def choose(
    plans: Sequence[Plan], ledger: Ledger, checkpoints: Sequence[Checkpoint], attempt: int, roots: list[Path] | None
) -> Choice:
    """Choose the target of ``attempt``. ``ledger`` is that of :func:`executed`; ``checkpoints`` are ascending."""
    choice = Choice(line=_newest_plan(plans, ledger, attempt))
    usable = []
    for checkpoint in checkpoints:
        why = _unusable(checkpoint, ledger, attempt, roots)
        if why is None:
            usable.append(checkpoint)
        elif not why.startswith("it is of"):
            choice.notices.append(f"checkpoint {checkpoint.path} of step {checkpoint.step}: {why}")
    plan = choice.line
    own = [checkpoint for checkpoint in usable if plan is None or checkpoint.attempt >= plan.for_attempt]
    if plan is not None and not own:
        choice.plan = plan
        _follow(choice, plan, ledger, checkpoints, usable, attempt, roots)
    elif own:
        newest = max(own, key=lambda checkpoint: (checkpoint.attempt, checkpoint.step, checkpoint.time))
        choice.target = Target(attempt=newest.attempt, step=newest.step, path=newest.path)
    return choice


def _newest_plan(plans: Sequence[Plan], ledger: Ledger, attempt: int) -> Plan | None:
    rollbacks = [plan for plan in plans if plan.action in RESTARTING_ACTIONS and plan.for_attempt <= attempt]
    if not rollbacks:
        return None
    newest = max(plan.for_attempt for plan in rollbacks)
    rivals = [plan for plan in rollbacks if plan.for_attempt == newest]
    noted = [entry.plan_id for entry in ledger.entries]
    # The receiver lets one plan an attempt through; should two files be there, the ledger says which one it was.
    return min(
        rivals, key=lambda plan: (noted.index(plan.plan_id) if plan.plan_id in noted else len(noted), plan.plan_id)
    )


def _follow(
    choice: Choice,
    plan: Plan,
    ledger: Ledger,
    checkpoints: Sequence[Checkpoint],
    usable: Sequence[Checkpoint],
    attempt: int,
    roots: list[Path] | None,
) -> None:
    """Take the plan's target, else the first fallback that can be loaded, else the newest checkpoint no newer than the target."""
    if plan.target is None:
        return
    by_path = {checkpoint.path: checkpoint for checkpoint in checkpoints}
    for number, target in enumerate([plan.target, *plan.fallback_targets]):
        why = _unloadable(target, by_path.get(target.path), ledger, roots)
        if why is None:
            choice.target = target
            if number:
                choice.notices.append(
                    f"plan {plan.plan_id}: resumes from its fallback {target.path} of step {target.step}"
                )
            return
        choice.notices.append(f"plan {plan.plan_id}: {target.path} of step {target.step}: {why}")
    older = [checkpoint for checkpoint in usable if checkpoint.step <= plan.target.step]
    if older:
        newest = max(older, key=lambda checkpoint: (checkpoint.attempt, checkpoint.step))
        choice.target = Target(attempt=newest.attempt, step=newest.step, path=newest.path)
        choice.notices.append(
            f"plan {plan.plan_id}: none of its targets can be loaded; resumes from {newest.path} of step {newest.step}"
        )
    else:
        choice.notices.append(f"plan {plan.plan_id}: no checkpoint can be loaded; begins from scratch")


def _unusable(checkpoint: Checkpoint, ledger: Ledger, attempt: int, roots: list[Path] | None) -> str | None:
    """Say why a checkpoint may not be loaded; reasons that begin with "it is of" are no news to anybody."""
    if checkpoint.attempt > attempt:
        return "it is of a later attempt"
    if checkpoint.abandoned or ledger.abandoned(checkpoint.attempt, checkpoint.step):
        return "it is of an abandoned line"
    if checkpoint.deleted:
        return "it is of the deleted ones"
    if checkpoint.quarantined:
        return "it is of those kept in quarantine"
    if not checkpoint.complete:
        return "it was never reported complete"
    if checkpoint.finite is False:
        return "it holds a non-finite value"
    return unreadable(checkpoint.path, roots)


def _unloadable(target: Target, known: Checkpoint | None, ledger: Ledger, roots: list[Path] | None) -> str | None:
    if ledger.abandoned(target.attempt, target.step):
        return "it is of an abandoned line"
    if known is not None:
        if (known.attempt, known.step) != (target.attempt, target.step):
            return f"its path was written again, by attempt {known.attempt} at step {known.step}"
        if known.abandoned:
            return "it is of an abandoned line"
        if known.deleted:
            return "it was deleted"
        if known.quarantined:
            return "it is a damaged state, kept in quarantine"
        if known.finite is False:
            return "it holds a non-finite value"
    return unreadable(target.path, roots)


def unreadable(path: str, roots: list[Path] | None) -> str | None:
    """Say why nothing can be loaded from a path, or None. A folder must hold something, a file must not be empty.

    With ``roots`` the path, its links followed, must lie inside one of them.
    """
    try:
        if "://" in path:
            return None if roots is None else "it is no path inside the configured roots"
        real = Path(path).resolve(strict=True)
        if in_quarantine(real):
            return "it is a damaged state, kept in quarantine"
        if roots is not None and not any(real.is_relative_to(root.resolve()) for root in roots):
            return f"{real} lies outside of the configured roots"
        if not os.access(real, os.R_OK):
            return "it cannot be read by this user"
        if real.is_dir():
            return None if any(real.iterdir()) else "its folder is empty"
        return None if real.stat().st_size else "its file is empty"
    except (OSError, ValueError, RuntimeError) as error:
        return f"it is not there ({error.strerror})" if isinstance(error, FileNotFoundError) else str(error)
