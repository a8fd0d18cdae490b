"""Why it happened: one line of evidence a file, each a pure function from facts to findings.

A line speaks for causes with weights; it never decides. The weights are combined here: what speaks for a cause as independent
witnesses would, what speaks against it as a discount. "Undetermined" is a legal answer, and then the report names the cheapest
test that would tell.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from msgspec import Struct
from msgspec.structs import replace

from trainwarden.rules.core.facts import CAUSES, Facts, Finding

from . import (
    after_event,
    batch_fingerprint,
    close_look,
    damaged_rows,
    device_errors,
    distributed,
    expected_loss,
    gradient_lead,
    hardware,
    learning_rate,
    loss_scale,
    moments,
    nonfinite,
    period_of_events,
    planned_change,
    probe_answer,
    recurring,
    repeated_step,
    resume_data,
    resume_mix,
    resume_nearby,
    resume_rate,
    resume_state,
    rules_say,
    shard_boundary,
)

#: All lines of evidence, in the order in which the report shows them.
LINES: tuple[Callable[[Facts], list[Finding]], ...] = (
    probe_answer.find,
    batch_fingerprint.find,
    shard_boundary.find,
    gradient_lead.find,
    expected_loss.find,
    learning_rate.find,
    nonfinite.find,
    close_look.find,
    damaged_rows.find,
    hardware.find,
    device_errors.find,
    distributed.find,
    loss_scale.find,
    moments.find,
    resume_nearby.find,
    planned_change.find,
    rules_say.find,
    recurring.find,
    resume_state.find,
    resume_rate.find,
    resume_data.find,
    resume_mix.find,
    repeated_step.find,
    after_event.find,
    period_of_events.find,
)

#: Kinds of findings that ask for a test even where they name a cause: what they say may be chance.
ASKING = (
    "repeated_step",
    "repeated_nearby",
    "repeated_age",
    "one_rank",
    "same_place",
    "failure",
    "ranks_disagree",
    "replayed",
)
#: A cause is named from this score on; below it the cause is undetermined.
NAMED_FROM = 0.5


class Cause(Struct, frozen=True, kw_only=True):
    """The likeliest cause, the confidence in it, every cause's score, the findings, and what would tell more."""

    name: str
    confidence: float
    scores: dict[str, float]
    findings: list[Finding]
    cheapest_test: str


def attribute(facts: Facts) -> Cause:
    """Weigh all lines of evidence."""
    findings = [finding for line in LINES for finding in line(facts)]
    findings = probe_answer.outweigh(findings)
    cause = weigh(findings, facts.onset)
    asked = next((finding.test for finding in findings if finding.test), "")
    return replace(cause, cheapest_test=asked) if asked else cause


def weigh(findings: Sequence[Finding], onset: int) -> Cause:
    """Combine findings into a cause; the confidence is the best score less half of the runner-up's.

    Where that is too little to name a cause, it is undetermined, with the same low confidence.
    """
    scores: dict[str, float] = {}
    for cause in CAUSES:
        doubt, discount = 1.0, 1.0
        for finding in findings:
            if finding.cause == cause:
                if finding.weight >= 0:
                    doubt *= 1 - finding.weight
                else:
                    discount *= 1 + finding.weight
        score = (1 - doubt) * discount
        if score > 0:
            scores[cause] = round(score, 3)
    ranked = sorted(scores.items(), key=lambda item: (-item[1], item[0]))
    best, score = ranked[0] if ranked else ("", 0.0)
    runner_up = ranked[1][1] if len(ranked) > 1 else 0.0
    confidence = max(0.0, score - 0.5 * runner_up)
    kinds = {finding.kind for finding in findings}
    test = _test_of(kinds, onset) or _cheapest_test([name for name, _ in ranked[:2]], onset)
    if confidence < NAMED_FROM:
        return Cause(
            name="undetermined",
            confidence=round(max(confidence, 0.0), 3),
            scores=scores,
            findings=list(findings),
            cheapest_test=test,
        )
    return Cause(
        name=best,
        confidence=round(min(confidence, 1.0), 3),
        scores=scores,
        findings=list(findings),
        cheapest_test=test if kinds.intersection(ASKING) else "",
    )


def _test_of(kinds: set[str], onset: int) -> str:
    """Return the test that a kind of finding asks for whatever the causes are, or an empty text."""
    if "failure" in kinds:
        return "Run the self-test of devices and fabric on the hosts that may have been first, before anything starts there again."
    if "repeated_age" in kinds:
        return f"Begin from another checkpoint: if it breaks after as many steps again and not at step {onset}, it is the process."
    return ""


def _cheapest_test(suspects: list[str], onset: int) -> str:
    """Return the test that parts the two likeliest causes at the least cost."""
    if "hardware" in suspects:
        return (
            f"Run step {onset} again with the suspect host's samples on another host (swap them): if it goes with the samples it is "
            "the data, if it stays with the host it is the hardware."
        )
    if "distributed" in suspects:
        return "Compare a checksum of the parameters between the ranks, and run the self-test of the collectives on their hosts."
    if "model" in suspects:
        return f"Resume well before step {onset} with half the learning rate: if it breaks there all the same, it is the model."
    if "data" in suspects and "numeric" in suspects:
        return (
            f"Run the batch of step {onset} once in another precision (float32): if the loss is still off it is the data, else the "
            "numerics."
        )
    if "data" in suspects:
        return (
            f"Look at the samples of step {onset} (trainwarden data show --step {onset}); then run the same weights on the next batch "
            "instead."
        )
    if "numeric" in suspects:
        return f"Repeat step {onset} from the checkpoint before it in float32."
    if "learning_rate" in suspects or "optimizer_state" in suspects:
        return f"Resume before step {onset} with half the learning rate: if it passes, it is the optimisation."
    return f"Replay step {onset} from the checkpoint before it: the same step again means data or kernel, another means state."
