"""Why it happened: one line of evidence a file, each a pure function from facts to findings.

A line speaks for causes with weights; it never decides. It answers what it found, that it looked and found nothing, or why it could not
look. The weights are combined here: what speaks for a cause as independent witnesses would, what speaks against it as a discount, and
the sum is told in words. "Undetermined" is a legal answer, and then the report names the cheapest test that would tell.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, Protocol

from msgspec import Struct
from msgspec.structs import replace

from trainwarden.rules.core.facts import CAUSES, Evidence, Facts, Finding, NotPossible

from . import (
    after_event,
    attention_logits,
    batch_fingerprint,
    close_look,
    collapse,
    damaged_rows,
    device_errors,
    distributed,
    exit_code,
    expected_loss,
    gradient_lead,
    hardware,
    instrument,
    known_suspects,
    learning_rate,
    loss_scale,
    lr_peak,
    moment_jump,
    moments,
    nonfinite,
    not_reproducible,
    one_step,
    other_environment,
    period_of_events,
    planned_change,
    probe_answer,
    recurring,
    reduced_norm,
    repeated_step,
    resume_data,
    resume_mix,
    resume_nearby,
    resume_rate,
    resume_state,
    router,
    rules_say,
    scale_trend,
    shard_boundary,
    slow_growth,
    underflow,
    weights_rewritten,
)


class Line(Protocol):
    """One line of evidence: a module of this folder."""

    __name__: str
    CLEAR: str  #: what is said where it looked and found nothing

    def find(self, facts: Facts) -> Evidence:
        """Return what it found, nothing, or why it could not look."""


#: All lines of evidence, in the order in which the report shows them.
LINES: tuple[Line, ...] = (
    probe_answer,
    batch_fingerprint,
    known_suspects,
    shard_boundary,
    one_step,
    gradient_lead,
    expected_loss,
    learning_rate,
    lr_peak,
    nonfinite,
    close_look,
    damaged_rows,
    attention_logits,
    underflow,
    hardware,
    device_errors,
    exit_code,
    distributed,
    reduced_norm,
    loss_scale,
    scale_trend,
    moments,
    moment_jump,
    collapse,
    slow_growth,
    weights_rewritten,
    router,
    other_environment,
    resume_nearby,
    planned_change,
    rules_say,
    recurring,
    resume_state,
    resume_rate,
    resume_data,
    resume_mix,
    repeated_step,
    not_reproducible,
    after_event,
    period_of_events,
    instrument,
)

Outcome = Literal["found", "ruled_out", "not_possible"]

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
#: Witnesses that are told by name.
MOST_TOLD = 6


class Answer(Struct, frozen=True):
    """What one line of evidence came to, and the sentence that says so."""

    line: str
    outcome: Outcome
    says: str


class Cause(Struct, frozen=True, kw_only=True):
    """The likeliest cause, the confidence in it, every cause's score, the findings, and what would tell more.

    ``explained`` tells the sum in words, ``answers`` what each line of evidence came to.
    """

    name: str
    confidence: float
    scores: dict[str, float]
    findings: list[Finding]
    cheapest_test: str
    explained: str = ""
    answers: tuple[Answer, ...] = ()


def attribute(facts: Facts) -> Cause:
    """Weigh all lines of evidence."""
    findings: list[Finding] = []
    answers = []
    for line in LINES:
        found = line.find(facts)
        answers.append(answer(line, found))
        if not isinstance(found, NotPossible):
            findings += found
    findings = probe_answer.outweigh(findings)
    cause = weigh(findings, facts.onset)
    asked = next((finding.test for finding in findings if finding.test), "")
    return replace(cause, answers=tuple(answers), cheapest_test=asked or cause.cheapest_test)


def answer(line: Line, found: Evidence) -> Answer:
    """Return what a line came to: of several findings the weightiest is told."""
    name = line.__name__.rpartition(".")[2]
    if isinstance(found, NotPossible):
        return Answer(name, "not_possible", f"{found.why[0].upper()}{found.why[1:]}.")
    there = [one for one in found if not one.absent]
    if there:
        return Answer(name, "found", max(there, key=lambda one: abs(one.weight)).says)
    return Answer(name, "ruled_out", found[0].says if found else line.CLEAR)


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
    named = confidence >= NAMED_FROM
    return Cause(
        name=best if named else "undetermined",
        confidence=round(min(confidence, 1.0), 3),
        scores=scores,
        findings=list(findings),
        cheapest_test=test if not named or kinds.intersection(ASKING) else "",
        explained=explain(findings, ranked, confidence),
    )


def explain(findings: Sequence[Finding], ranked: Sequence[tuple[str, float]], confidence: float) -> str:
    """Return the sum in words: the witnesses for and against the best cause, and what is subtracted for the runner-up."""
    if not ranked:
        told = dict.fromkeys(f"{_words(one.kind)} against {_words(one.cause)}" for one in findings if one.weight < 0)
        return "Nothing speaks for any cause" + (f"; {', '.join(list(told)[:MOST_TOLD])}." if told else ".")
    best, score = ranked[0]
    says = f"For {_words(best)} {_witnesses(findings, best, 1)}"
    against = _witnesses(findings, best, -1)
    says += f"; against it {against}" if against else "; nothing against it"
    says += f": {score:.2f}."
    if len(ranked) > 1:
        other, its = ranked[1]
        says += f" Half of the {its:.2f} of the runner-up, {_words(other)}, is subtracted: {confidence:.2f}."
    if confidence < NAMED_FROM:
        says += f" That is below {NAMED_FROM:g}, from which a cause is named."
    return says


def _witnesses(findings: Sequence[Finding], cause: str, sign: int) -> str:
    """Return the kinds of findings that speak for a cause (against it where ``sign`` is -1), the weightiest first."""
    found = [(one.kind, abs(one.weight)) for one in findings if one.cause == cause and one.weight * sign > 0]
    found.sort(key=lambda one: (-one[1], one[0]))
    told = [f"{_words(kind)} ({weight:.2f})" for kind, weight in found[:MOST_TOLD]]
    more = f" and {len(found) - MOST_TOLD} more" if len(found) > MOST_TOLD else ""
    return f"{', '.join(told)}{more}"


def _words(name: str) -> str:
    return name.replace("_", " ")


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
