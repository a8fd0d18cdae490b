"""A plan in the run's folder: written, seen, taken back. The caller keeps the next attempt from starting meanwhile.

The plan file comes first and the ledger entry second. If the receiver dies between them and the run happens to restart,
the trainer applies the plan all the same, and the entry is added when the receiver is back.
"""

from __future__ import annotations

import os
import secrets
from pathlib import Path

from trainwarden import plan as plans
from trainwarden.plan import ENDING_ACTIONS, RESTARTING_ACTIONS, Ledger, LedgerEntry, Plan
from trainwarden.runfolder import RunFolder

#: Room that must be left beside the plan and the ledger, in bytes: the supervisor's state and a journal's first lines.
MARGIN = 65536


def plan_path(run: RunFolder, plan: Plan) -> Path:
    """Return where :meth:`RunFolder.write_plan` puts this plan."""
    return run.plan_folder / f"{plan.for_attempt}-{plan.plan_id}.json"


def written(run: RunFolder, plan: Plan) -> bool:
    """Say whether the plan file is in place."""
    return plan_path(run, plan).exists()


def rival(run: RunFolder, plan: Plan) -> str | None:
    """Return the id of another plan that ends the same attempt: one that another receiver has written."""
    for other in run.read_plans()[0]:
        if other.for_attempt == plan.for_attempt and other.action in ENDING_ACTIONS and other.plan_id != plan.plan_id:
            return other.plan_id
    return None


def write(run: RunFolder, plan: Plan) -> None:
    """Write the plan file and, for a rollback or a probe, its entry in the run's ledger. What is there already stays.

    Raises:
        OSError: the disk is full or the folder cannot be written.
        PlanError: the run's ledger cannot be read.
    """
    if not written(run, plan):
        run.write_plan(plan)
    if plan.action not in RESTARTING_ACTIONS or plan.target is None:
        return
    ledger = run.ledger() or Ledger(run_uid=plan.run_uid)
    if any(entry.plan_id == plan.plan_id for entry in ledger.entries):
        return
    entry = LedgerEntry(
        plan_id=plan.plan_id,
        for_attempt=plan.for_attempt,
        target_step=plan.target.step,
        skip_samples=plan.skip_samples,
        skip_epoch=plan.skip_epoch,
        exclude=plan.exclude,
        skip_mode=plan.skip_mode,
        exclude_hosts=plan.exclude_hosts,
    )
    run.write_ledger(Ledger(run_uid=ledger.run_uid, entries=[*ledger.entries, entry]))


def take_back(run: RunFolder, plan: Plan) -> None:
    """Undo :func:`write` for a plan that no attempt has seen.

    Raises:
        OSError: the folder cannot be written.
        PlanError: the run's ledger cannot be read.
    """
    ledger = run.ledger()
    if ledger is not None and any(entry.plan_id == plan.plan_id for entry in ledger.entries):
        rest = [entry for entry in ledger.entries if entry.plan_id != plan.plan_id]
        run.write_ledger(Ledger(run_uid=ledger.run_uid, entries=rest))
    plan_path(run, plan).unlink(missing_ok=True)


def try_space(run: RunFolder, plan: Plan) -> None:
    """Write as many bytes as the plan and the ledger need, and remove them again.

    Raises:
        OSError: they do not fit, or the folder cannot be written.
    """
    path = run.path / "ledger.json"
    need = len(plans.encode(plan)) * 2 + (path.stat().st_size if path.exists() else 0) + MARGIN
    run.plan_folder.mkdir(parents=True, exist_ok=True)
    draft = run.plan_folder / f".space.{os.getpid()}.{secrets.token_hex(4)}"
    descriptor = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(b"\0" * need)
            file.flush()
            os.fsync(file.fileno())
    finally:
        draft.unlink(missing_ok=True)
