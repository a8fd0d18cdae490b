"""Did the plan take effect, and did it help? Judged by the new attempt's records, never by its report (design §4.8).

Three windows, in global steps:

1. from the target to the onset: the samples are those of the parent attempt at the same steps, and what the plan's checks say; the
   loss equals the parent's within paired noise where the plan changes neither optimizer, learning rate nor earlier data, otherwise it
   is not worse;
2. from the onset to the end of the skip: no alert;
3. from there, or from the end of the ramp, on: not worse than the *pre-onset trend extrapolated*, one-sided. Never compared with the
   damaged curve.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

import numpy as np

from trainwarden.plan import Plan, merge_ranges
from trainwarden.ranges import length, shared
from trainwarden.record import Step
from trainwarden.rules.core.counted import counted

from .planned import Announced
from .settings import Settings
from .state import Check, Incident, Verification
from .trace import Trace
from .trend import Trend, shift

Outcome = Literal["recovered", "not_recovered", "inconclusive", "mismatch"]

#: Loss differences of the same step in two attempts: equal within the first share of the noise, not the same beyond the second.
SAME, OTHER = 0.5, 2.0
#: Relative difference of learning rates that are equal.
RATE = 1e-4
#: Standard errors by which the mean must exceed the trend to be worse.
ERRORS = 3.0
#: Excess, in standard deviations of one record, below which a difference does not matter.
HARMLESS = 0.5
#: A comparison with an error of more than this share of the loss proves nothing.
BLUNT = 0.05
#: Differences of the first window that are remembered.
REMEMBERED = 4000
#: Share of the third window that a run which ends early must have, and the records of it that always suffice.
HALF, ENOUGH = 0.5, 50


@dataclass(frozen=True, slots=True)
class Judged:
    """One line for the timeline, with the outcome where that settles it."""

    says: str
    outcome: Outcome | None = None


def skip_end_step(plan: Plan, parent: Trace | None, onset: int, last_step: int) -> int:
    """Return the first step that no longer draws on skipped samples, by the parent's records or their pace.

    Without a skip it is the step after the parent's last: up to there the parent was broken.
    """
    if not plan.skip_samples:
        return max(onset, last_step) + 1
    end = max(end for _, end in plan.skip_samples)
    if parent is None or not len(parent):
        return onset + 1
    known = parent.sample_end >= 0
    ends = parent.sample_end[: len(parent)]
    firsts = parent.sample_first[: len(parent)]
    touching = np.flatnonzero((firsts < end) & known[: len(parent)] & (parent.steps >= onset))
    if not len(touching):
        return onset + 1
    row = int(touching[-1])
    step, consumed = int(parent.steps[row]), int(ends[row])
    if consumed >= end:
        return step + 1
    pace = float(np.median(ends[touching] - firsts[touching])) / parent.stride()
    return step + 1 + int(np.ceil((end - consumed) / max(pace, 1.0)))


def begin(
    incident: Incident,
    plan: Plan,
    attempt: int,
    start_id: str,
    first_step: int,
    parent: Trace | None,
) -> Verification:
    """Return the verification of an incident whose plan was executed as ``attempt``, which begins at ``first_step``."""
    last = int(parent.steps[-1]) if parent is not None and len(parent) else incident.opened_step
    end = skip_end_step(plan, parent, incident.onset, last)
    checks = plan.checks
    return Verification(
        attempt=attempt,
        start_id=start_id,
        parent_attempt=incident.attempt,
        plan=plan,
        first_step=first_step,
        onset_step=incident.onset - incident.uncertainty,
        skip_end=end,
        after_from=max(end, first_step + plan.rewarmup_steps),
        optimizer_expected=None if checks is None else checks.optimizer_step,
        lr_expected=None if checks is None else checks.lr,
    )


def go_on(verification: Verification, start_id: str, attempt: int, first_step: int) -> None:
    """Continue in a restart of the same line: what its steps repeat is forgotten and seen anew."""
    verification.start_id, verification.attempt = start_id, attempt
    verification.resumed += 1
    if verification.skipped_since and "optimizer_step" not in verification.checks:
        verification.optimizer_expected = None  # some of the steps that were left out may be made again
    kept = [place for place, step in enumerate(verification.after_steps) if step < first_step]
    verification.after_steps = [verification.after_steps[place] for place in kept]
    verification.after_losses = [verification.after_losses[place] for place in kept]


def observe(
    verification: Verification, record: Step, parent: Trace | None, trend: Trend | None, settings: Settings
) -> list[Judged]:
    """Take one record of the new attempt."""
    judged = _look_at_checks(verification, record)
    if any(one.outcome for one in judged):
        return judged
    verification.skipped_since += _skipped(record)
    destroyed = _destroyed(verification, record, parent, settings)
    if destroyed is not None:
        return [*judged, destroyed]
    if record.step < verification.onset_step:
        _compare(verification, record, parent)
    elif verification.first_window is None:
        one = _first_window(verification, trend)
        verification.first_window = one.says
        judged.append(one)
    if record.step >= verification.skip_end and verification.second_window is None:
        verification.second_window = f"From step {verification.onset_step} to the end of the skip no alert fired."
        judged.append(Judged(verification.second_window))
    if record.step >= verification.after_from:
        loss = record.value("loss")
        if loss is not None and (math.isfinite(loss) or not _left_out(record)):
            verification.after_steps.append(record.step)
            verification.after_losses.append(loss)
        if record.step >= verification.after_from + settings.verify_steps - record.stride:
            judged.append(third_window(verification, trend, settings.verify_steps))
    return judged


def _left_out(record: Step) -> bool:
    """Say whether no update was made of the record's losses: by a GradScaler, or by a guard."""
    causes = ("nonfinite", "limit", "surge")
    guarded = sum(_whole(record.value("guard_skipped_steps", cause)) or 0 for cause in causes)
    return _skipped(record) + guarded >= record.stride


def _destroyed(verification: Verification, record: Step, parent: Trace | None, settings: Settings) -> Judged | None:
    """Say that the weights are no longer numbers, which no later record can mend; before the onset, where the parent's still were."""
    loss = record.value("loss")
    if loss is None or math.isfinite(loss) or _left_out(record):
        if loss is not None:
            verification.nonfinite = 0
        return None
    theirs = None if parent is None else parent.at("loss", record.step)
    if record.step < verification.onset_step and theirs is not None and not math.isfinite(theirs):
        return None
    verification.nonfinite += 1
    # One record before policy asks for the next rollback: that one is to know that this one did not help.
    if verification.nonfinite < max(2, settings.nonfinite_steps // record.stride) - 1:
        return None
    says = f"The loss is not finite for {counted(verification.nonfinite, 'record')} up to step {record.step}: the rollback did not help."
    return Judged(says, "not_recovered")


def finish_early(verification: Verification, last_step: int, trend: Trend | None, settings: Settings) -> Judged:
    """Judge a run that ends before the third window is full: with half of it, else it stays open what happened."""
    seen = last_step - verification.after_from + 1
    if seen >= HALF * settings.verify_steps:
        return third_window(verification, trend, settings.verify_steps)
    return Judged(
        f"The run ended {counted(max(seen, 0), 'step')} into the last window; {round(HALF * settings.verify_steps)} are needed.",
        "inconclusive",
    )


def cut_short(verification: Verification, change: Announced, trend: Trend | None, settings: Settings) -> Judged:
    """Judge at a planned change behind the onset: what follows has another level than the trend foretells."""
    seen = change.step - verification.after_from + 1
    if seen >= HALF * settings.verify_steps:
        return third_window(verification, trend, settings.verify_steps)
    return Judged(
        f"The planned change of {change.name} after step {change.step} gives the loss another level, {counted(max(seen, 0), 'step')} into "
        f"the last window; {round(HALF * settings.verify_steps)} are needed to compare it with the trend before the onset.",
        "inconclusive",
    )


def _look_at_checks(verification: Verification, record: Step) -> list[Judged]:
    checks, plan, judged = verification.checks, verification.plan, []

    def seen(name: str, ok: bool, says: str) -> None:
        if name not in checks or (checks[name].ok and not ok):
            checks[name] = Check(says, ok)
            judged.append(Judged(says if ok else f"Plan was not applied: {says}", None if ok else "mismatch"))

    if verification.resumed == 0 and plan.checks is not None and "start_step" not in checks:
        expected = plan.checks.start_step
        seen(
            "start_step",
            record.step - record.stride + 1 <= expected <= record.step,
            f"The first record is of step {record.step}, expected {expected}.",
        )
    rate = record.value("lr")
    if verification.resumed == 0 and verification.lr_expected is not None and rate is not None and "lr" not in checks:
        expected_rate = verification.lr_expected
        same = abs(rate - expected_rate) <= RATE * max(abs(expected_rate), 1e-30)
        seen("lr", same, f"The learning rate at step {record.step} is {rate:g}, expected {expected_rate:g}.")
    counter = _whole(record.value("optimizer_step"))
    if verification.optimizer_expected is not None and counter is not None and "optimizer_step" not in checks:
        first = plan.checks.start_step if plan.checks is not None else verification.first_step
        skipped = verification.skipped_since + _skipped(record)
        expected = verification.optimizer_expected + (record.step - first) - skipped
        if plan.reset_optimizer and verification.resumed:
            return judged
        seen(
            "optimizer_step",
            counter == expected,
            f"The optimizer's counter at step {record.step} is {counter}, expected {expected}.",
        )
    overlap = _skipped_samples(plan, record)
    if overlap:
        substituted = _whole(record.value("substituted_samples")) or 0
        if plan.skip_mode == "substitute":
            ok = substituted == overlap
            says = f"Step {record.step} covers {overlap} skipped samples and substituted {substituted}."
        else:
            ok, says = False, f"Step {record.step} consumed {counted(overlap, 'sample')} that were to be left out."
        seen("skipped", ok, says)
    return judged


def _skipped_samples(plan: Plan, record: Step) -> int:
    epoch = _whole(record.value("epoch"))
    if not plan.skip_samples or (epoch is not None and epoch != plan.skip_epoch):
        return 0
    return length(shared(record.samples, plan.skip_samples))


def _whole(value: float | None) -> int | None:
    """Return a count as a whole number, None for what is none."""
    return None if value is None or not math.isfinite(value) else int(value)


def _skipped(record: Step) -> int:
    """Return how many of the record's steps the GradScaler skipped."""
    return min(max(_whole(record.value("skipped")) or 0, 0), record.stride)


def _compare(verification: Verification, record: Step, parent: Trace | None) -> None:
    if parent is None:
        return
    row = parent.row(record.step)
    if row >= len(parent) or int(parent.steps[row]) != record.step:
        return
    verification.compared += 1
    theirs, ours = parent.samples(row), merge_ranges(record.samples)
    shifted = verification.plan.skip_mode == "shift" and any(
        first < end for _, end in theirs for first, _ in verification.plan.skip_samples
    )
    if theirs and ours and not shifted and theirs != ours:
        verification.differing_samples += 1
        if verification.first_difference is None:
            verification.first_difference = record.step
    if _skipped_samples(verification.plan, record):
        return  # its batch is another one: what it says is nothing about the state
    before, now = parent.at("loss", record.step), record.value("loss")
    if before is not None and now is not None and len(verification.differences) < REMEMBERED:
        verification.differences.append(now - before)


def _first_window(verification: Verification, trend: Trend | None) -> Judged:
    if verification.differing_samples:
        return Judged(
            f"Plan was not applied: {verification.differing_samples} of {counted(verification.compared, 'step')} before the onset "
            f"consumed other samples than the parent attempt, first at step {verification.first_difference}.",
            "mismatch",
        )
    differences = np.array(verification.differences)
    differences = differences[np.isfinite(differences)]
    if not len(differences) or trend is None or trend.noise <= 0:
        return Judged("Nothing to compare with the parent attempt before the onset.")
    plan = verification.plan
    unchanged = not (plan.reset_optimizer or plan.lr_factor != 1.0 or plan.rewarmup_steps)
    middle = float(np.median(np.abs(differences))) if unchanged else float(np.median(differences))
    size = middle / trend.noise
    says = (
        f"Before the onset {counted(len(differences), 'step')} {'has' if len(differences) == 1 else 'have'} the parent's samples; their losses differ by "
        f"{middle:.3g} ({size:.2g} of one record's noise)."
    )
    if size <= SAME:
        return Judged(says)
    if size > OTHER and len(differences) >= 5:
        if unchanged:
            return Judged(f"Plan was not applied: {says} The state was not restored.", "mismatch")
        return Judged(f"{says} That is worse.", "not_recovered")
    return Judged(f"{says} That is more than a restored run usually differs.")


def third_window(verification: Verification, trend: Trend | None, verify_steps: int) -> Judged:
    """Compare the losses after skip and ramp with the pre-onset trend: those of half of ``verify_steps`` at least."""
    if trend is None:
        return Judged("The records before the onset give no trend to compare with.", "inconclusive")
    steps = np.array(verification.after_steps, dtype=np.int64)
    losses = np.array(verification.after_losses, dtype=np.float64)
    if np.count_nonzero(~np.isfinite(losses)):
        return Judged("The loss after the rollback is not finite.", "not_recovered")
    found = shift(trend, steps, losses)
    if found is None:
        return Judged("No loss was recorded after the skip.", "inconclusive")
    covered = found.n * (int(np.median(np.diff(steps))) if len(steps) > 1 else 1)
    if covered < HALF * verify_steps and found.n < ENOUGH:
        return Judged(
            f"A loss was recorded for {counted(found.n, 'record')} after the skip alone; {round(HALF * verify_steps)} steps are needed.",
            "inconclusive",
        )
    verification.result = found
    says = (
        f"Over {counted(found.n, 'record')} from step {int(steps[0])} to {int(steps[-1])} the loss lies {found.excess:+.3g} "
        f"against the trend before the onset (standard error {found.error:.2g})."
    )
    if found.excess > max(ERRORS * found.error, HARMLESS * trend.noise):
        return Judged(f"{says} That is worse.", "not_recovered")
    level = float(np.mean(np.abs(losses)))
    if found.error > BLUNT * level and found.excess > 0:
        return Judged(f"{says} The trend is too uncertain to tell.", "inconclusive")
    unseen = never_told(verification)
    missing = f" The records never told of the {', '.join(unseen)}." if unseen else ""
    return Judged(f"{says} It is not worse.{missing}", "recovered")


def never_told(verification: Verification) -> list[str]:
    """Return in words which of the plan's checks no record of the attempt answered."""
    plan, seen = verification.plan, verification.checks
    asked = {
        "lr": ("learning rate", verification.lr_expected is not None),
        "optimizer_step": ("optimizer's counter", verification.optimizer_expected is not None),
        "skipped": ("skipped samples", bool(plan.skip_samples)),
    }
    return [words for name, (words, is_asked) in asked.items() if is_asked and name not in seen]
