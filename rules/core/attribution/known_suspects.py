"""The onset's step read samples that spiked before: in another run, in another epoch, or at another step of this run.

Two runs, or two epochs in another order, have the samples in common and hardly anything else: the state is another and so are the
neighbours in the batch. That is a witness of its own, as strong as a single odd fingerprint and more (0.6: it names the data by itself;
0.75 where the memory was confirmed before). What was remembered of one odd step without a cause may have been a hard batch, so alone it does not reach
the 0.5 from which a cause is named (0.45). At the same step of the same order the recipe and its schedule are the same, too: the data
and everything else that is fixed (0.3); a later attempt of the same run is told of by ``repeated_step`` and adds nothing here.

What any step may meet by chance is no witness: each weight is lessened by the share of the epoch's steps that read something
remembered, and is nothing where these are more than a quarter.
"""

from __future__ import annotations

from trainwarden.rules.core.counted import counted
from trainwarden.rules.core.facts import Evidence, Facts, Finding, NotPossible
from trainwarden.rules.core.sightings import Known

#: What is said where this line looked and found nothing.
CLEAR = "The onset's samples are none that are remembered for having spiked before."

#: Weights as above: confirmed, of a cause, of an odd step alone, of the same step of another run.
CONFIRMED, NAMED, ODD, TWIN = 0.75, 0.6, 0.45, 0.3
#: Likelihood of meeting something remembered by chance up to which it is evidence: at a quarter, four times as likely if it is the data.
BY_CHANCE = 0.25
#: Steps by which two onsets may differ and still be the same step; a record may cover several.
NEAR = 3
#: Sightings that are told.
MOST = 3


def find(facts: Facts) -> Evidence:
    """Return one finding that weighs, of the strongest sighting, and what others say without a weight: they are not independent."""
    if facts.known is None:
        return NotPossible("no start event says which data set was read in which order")
    ranked = sorted(facts.known, key=lambda one: (-_weight(facts, one), -one.seen.sure, one.seen.id))
    findings = []
    for place, one in enumerate(ranked[:MOST]):
        if one.how == "replay" and _same_step(facts, one):
            continue
        weight = _weight(facts, one) if place == 0 else 0.0
        says = _says(facts, one)
        cause = "data" if weight else ""
        findings.append(Finding(kind="known_suspects", step=one.met.step, cause=cause, weight=weight, says=says))
    return findings


def _same_step(facts: Facts, one: Known) -> bool:
    return abs(one.met.step - one.seen.step) <= max(NEAR * facts.trace.stride(), facts.uncertainty)


def _by_chance(facts: Facts, one: Known) -> float:
    """Return how likely the onset, or the steps among which it may lie, meets something remembered whatever the cause is."""
    steps = 1 if one.met.step == facts.onset else facts.uncertainty // facts.trace.stride() + 1
    return min(1.0, one.met.chance * steps)


def _weight(facts: Facts, one: Known) -> float:
    chance = _by_chance(facts, one)
    if chance > BY_CHANCE or (one.how == "replay" and _same_step(facts, one)):
        return 0.0
    weight = ODD if one.seen.weak else NAMED
    if one.how == "twin":
        weight = TWIN
    elif one.seen.state == "confirmed":
        weight = CONFIRMED
    return round(weight * (1.0 - chance), 3)


def _says(facts: Facts, one: Known) -> str:
    seen = one.seen
    where = "this run" if one.how != "twin" and seen.run_uid == facts.run_uid else f"run {seen.run}"
    says = f"The same samples spiked in {where}, attempt {seen.attempt}, at step {seen.step}"
    says += f", and in {counted(len(seen.again), 'other incident')}" if seen.again else ""
    what = seen.verdict.replace("_", " ")
    says += f" ({what}, cause {seen.cause})" if seen.cause != "undetermined" else f" ({what} without a known cause)"
    if one.how == "twin":
        says += ", at the same place of the same order: the data, or what both recipes have in common"
    elif _by_chance(facts, one) > BY_CHANCE:
        says += "; so much is remembered that this may be chance"
    return f"{says}."
