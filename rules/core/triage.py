"""Triage from cheap to dear: what was looked at first, second, last; each check found, ruled out, or not possible and why.

The order is that in which a person would go about it: the shape of the curve costs a look, the batch a look at its samples, histories of
gradient and scale a query, a trial of the learning rate a restart, numeric checks a replay in another precision, the distributed state
a stop of all ranks. Every line of evidence is one check; the shape and the trial of the rate are checks of their own.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType

from msgspec import Struct

from .attribution import Answer, Outcome
from .facts import Facts

#: The lines of evidence that belong to each stage, the cheapest stage first.
STAGES: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        "shape": (
            *("one_step", "recurring", "period_of_events", "after_event", "planned_change", "instrument", "rules_say"),
            "other_environment",
        ),
        "batch": (
            *("batch_fingerprint", "known_suspects", "expected_loss", "shard_boundary", "damaged_rows"),
            *("resume_data", "resume_mix"),
        ),
        "gradient and scale history": (
            *("gradient_lead", "moments", "moment_jump", "collapse", "loss_scale", "scale_trend", "slow_growth"),
            *("weights_rewritten", "router", "resume_nearby", "resume_state"),
        ),
        "learning-rate trial": ("learning_rate", "lr_peak", "resume_rate"),
        "numeric checks": ("nonfinite", "close_look", "attention_logits", "underflow", "exit_code"),
        "distributed state": (
            *("distributed", "reduced_norm", "hardware", "device_errors", "repeated_step", "not_reproducible"),
            "probe_answer",
        ),
    }
)
#: Checks that are no line of evidence.
SHAPE, TRIAL = "shape", "rate_trial"


class Checked(Struct, frozen=True):
    """One check: its stage, its name, what came of it, and the sentence that says so."""

    stage: str
    check: str
    outcome: Outcome
    says: str


def triage(facts: Facts, verdict: str, answers: Sequence[Answer]) -> list[Checked]:
    """Return all checks in their order."""
    by_line = {one.line: one for one in answers}
    found = [_shape(facts, verdict)]
    for stage, lines in STAGES.items():
        if stage == "learning-rate trial":
            found.append(_trial(facts))
        found += [Checked(stage, name, by_line[name].outcome, by_line[name].says) for name in lines if name in by_line]
    return found


def _shape(facts: Facts, verdict: str) -> Checked:
    if facts.trend is None and not facts.nonfinite.any():
        says = "There is no trend of the loss before the onset; what the rules saw is all that is told of the shape."
        return Checked("shape", SHAPE, "not_possible", says)
    return Checked("shape", SHAPE, "found", f"The shape is {verdict.replace('_', ' ')}.")


def _trial(facts: Facts) -> Checked:
    """Say what an attempt with another rate showed: the only trial of the rate that records can hold."""
    stage, factor = "learning-rate trial", facts.planned.lr_factor
    if factor == 1.0:
        why = "No attempt went over these steps with another rate: a trial takes a restart before the onset with half of it."
        return Checked(stage, TRIAL, "not_possible", why)
    same = [
        one for one in facts.earlier if abs(one.onset - facts.onset) <= max(facts.uncertainty, 3 * facts.trace.stride())
    ]
    if same:
        says = f"With {factor:g} times the rate it broke at step {facts.onset} again, as in attempt {same[-1].attempt}: not the rate."
        return Checked(stage, TRIAL, "ruled_out", says)
    says = f"This attempt runs with {factor:g} times the rate, and broke at another step than those before it: the rate is not all of it."
    return Checked(stage, TRIAL, "ruled_out", says)


def untold(why: str) -> list[Checked]:
    """Return all checks as not possible, for an incident that no records judge."""
    found = [Checked("shape", SHAPE, "not_possible", why)]
    for stage, lines in STAGES.items():
        if stage == "learning-rate trial":
            found.append(Checked(stage, TRIAL, "not_possible", why))
        found += [Checked(stage, name, "not_possible", why) for name in lines]
    return found
