"""Everything that is checked before a run is touched. Each function raises :class:`RefusedError` or returns; none writes."""

from __future__ import annotations

from datetime import datetime
from pathlib import Path

from trainwarden.plan import ENDING_ACTIONS, Plan, PlanError, Target
from trainwarden.runfolder import RunFolder, RunFolderError, in_quarantine
from trainwarden.webhook import Request, expired

from . import planfiles
from .refusals import RefusedError
from .schedulers.scheduler import Situation
from .targets import UnreadableError, check_readable, inside


def check_expiry(request: Request, now: datetime) -> None:
    """Refuse what came too late.

    Raises:
        RefusedError: it is past ``expires_at``.
        WebhookError: ``expires_at`` is no time.
    """
    if expired(request, now):
        raise RefusedError("expired", f"expires_at was {request.expires_at}")


def find_run(request: Request, roots: list[Path]) -> RunFolder:
    """Return the folder of the run that is meant: of its name under one of the roots, and of its run_uid.

    Raises:
        RefusedError: there is none.
    """
    says = f"no folder {request.run!r} under {', '.join(map(str, roots))}"
    for root in roots:
        try:
            run = RunFolder(request.run, root)
            identity = run.identity()
        except (RunFolderError, OSError) as error:
            says = str(error)
            continue
        if identity is None:
            continue
        if not inside(run.path, roots):
            says = f"{run.path} is a link that leaves the roots"
        elif identity.run_uid == request.run_uid:
            return run
        else:
            says = f"{run.path} belongs to another run, {identity.run_uid}"
    raise RefusedError("unknown_run", says)


def check_plan(request: Request, action: str) -> None:
    """Refuse a plan that contradicts the request. (One that contradicts itself is no valid body: ``plan.check_plan``.)

    Raises:
        RefusedError: it does.
    """
    plan, attempt = request.plan, request.attempt
    if plan.run_uid != request.run_uid:
        raise RefusedError("bad_plan", f"plan.run_uid is {plan.run_uid}, the request's {request.run_uid}")
    if action == "pin":
        return
    if plan.action != action:
        raise RefusedError("bad_plan", f"plan.action is {plan.action}, the request asks for {action}")
    if action not in ENDING_ACTIONS and plan.for_attempt != attempt:
        raise RefusedError(
            "bad_plan", f"plan.for_attempt is {plan.for_attempt}; {action} is asked of attempt {attempt}"
        )
    if action in ENDING_ACTIONS and plan.for_attempt != attempt + 1:
        raise RefusedError("bad_plan", f"plan.for_attempt is {plan.for_attempt}, after attempt {attempt}")
    for target in (plan.target, *plan.fallback_targets):
        if target is not None and not 0 <= target.attempt <= attempt:
            raise RefusedError("bad_plan", f"a target of attempt {target.attempt} in attempt {attempt}")


def check_new(run: RunFolder, plan: Plan) -> None:
    """Refuse a further soft request whose plan has the name of one that lies there: the exporters have read that one.

    Raises:
        RefusedError: so it has.
    """
    if planfiles.written(run, plan):
        raise RefusedError(
            "bad_plan", f"plan {plan.plan_id} lies in the run's folder; a further request names another plan"
        )


def check_attempt(request: Request, situation: Situation) -> None:
    """Refuse what concerns another attempt than the one that is alive.

    Raises:
        RefusedError: so it is.
    """
    if situation.attempt != request.attempt:
        raise RefusedError("stale", f"attempt {situation.attempt} is the newest one, not {request.attempt}")
    if situation.state == "over":
        raise RefusedError("stale", f"attempt {request.attempt} is over and nothing is to be started after it")


def check_restart(request: Request, situation: Situation) -> None:
    """Refuse a rollback or a probe of a run that could not be started again, or whose next attempt would not be the plan's.

    Raises:
        RefusedError: so it is.
    """
    if situation.cannot:
        raise RefusedError("not_restartable", situation.cannot)
    if situation.next_attempt != request.plan.for_attempt:
        raise RefusedError(
            "stale", f"the next start will be attempt {situation.next_attempt}, not {request.plan.for_attempt}"
        )


def check_targets(run: RunFolder, plan: Plan, folder: str, checkpoints: list[Path]) -> None:
    """Refuse a rollback or a probe that goes back to a checkpoint that is missing, unfinished, abandoned, or outside the configured folders.

    ``folder`` is what relative paths start from. Fallback targets must lie inside; they need not be readable.

    Raises:
        RefusedError: any of it.
    """
    if plan.target is None:
        raise RefusedError("no_target", "a rollback or a probe names the checkpoint to go back to")
    for target in (plan.target, *plan.fallback_targets):
        if in_quarantine(_place(target, folder)):
            raise RefusedError("quarantined_target", f"{target.path} is a damaged state, kept in quarantine")
        if not inside(_place(target, folder), checkpoints):
            places = ", ".join(map(str, checkpoints))
            raise RefusedError(
                "outside_roots", f"{target.path} lies in none of {places}; allow its folder with `checkpoints`"
            )
    try:
        ledger = run.ledger()
    except (PlanError, OSError) as error:
        raise RefusedError("no_space", f"the run's ledger cannot be read or continued: {error}") from None
    if ledger is not None and ledger.abandoned(plan.target.attempt, plan.target.step):
        raise RefusedError(
            "abandoned_target",
            f"step {plan.target.step} of attempt {plan.target.attempt} belongs to a line that was rolled back",
        )
    try:
        check_readable(_place(plan.target, folder))
    except UnreadableError as error:
        raise RefusedError("unreadable_target", str(error)) from None


def check_space(run: RunFolder, plan: Plan) -> None:
    """Refuse a plan that could not be written.

    Raises:
        RefusedError: it could not.
    """
    try:
        planfiles.try_space(run, plan)
    except OSError as error:
        raise RefusedError("no_space", f"{run.plan_folder}: {error.strerror}") from None


def _place(target: Target, folder: str) -> Path:
    return Path(folder) / target.path
