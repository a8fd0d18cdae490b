"""The batch's fingerprint is off its baseline at the onset, and at how many of the incident's steps it stays off.

One odd batch proves little (healthy data has them); a fingerprint that is off at most steps since the onset is what a dirty
shard looks like. Empty targets (no supervised token) explain a NaN loss by themselves (case A17).
"""

from __future__ import annotations

import numpy as np

from trainwarden.rules.core.facts import Evidence, Facts, Finding, NotPossible
from trainwarden.rules.core.shards import begun
from trainwarden.rules.core.trace import FINGERPRINT

#: What is said where this line looked and found nothing.
CLEAR = "The batches since the onset look like those before it."

#: Share of steps that meet something remembered up to which it means anything that this one did.
BY_CHANCE = 0.25
#: What batches that look as ever weigh, and what where it began with a shard and ended with it, or where a shard begins there that does
#: so one time in a hundred: of targets that are wrong, or text that makes no sense, a fingerprint tells nothing.
CLEAN, UNSEEN, RARELY = -0.5, -0.2, 0.01
#: Batches that are looked at together, at least and at most; standard errors and factor by which their middle is off, and what that weighs.
SEVERAL, OFF, APART, TOGETHER = (15, 40), 8.0, 1.4, 0.6
#: Steps around the onset at which the first dirty batch must lie to have started it.
NEAR = 3


def find(facts: Facts) -> Evidence:
    """Return one finding: persistent, single, or clean where the fingerprint was measured."""
    seen = [name for name in FINGERPRINT if name in facts.usual]
    if not seen or not facts.records:
        return NotPossible("no fingerprint of the batches is recorded, or too few of them before the onset")
    count = int(np.count_nonzero(facts.dirty))
    if count == 0 and any(cause == "data" for _, cause, _, _ in facts.blamed):
        return []  # a rule has seen what repeats and distinct tokens do not show
    if count == 0 and any(one.how == "run" and one.met.chance <= BY_CHANCE for one in facts.known or ()):
        return []  # nor did another run, or another epoch, that spiked on the same samples
    if count == 0 and facts.whose.kind in ("loss", "gradient", "nonfinite") and 0 not in facts.whose.ranks:
        return NotPossible("the fingerprint is that of the first rank's batches, and another rank stood out")
    if count == 0:
        together = _together(facts)
        if together:
            return [
                Finding(kind="batch_fingerprint", step=facts.onset, cause="data", weight=TOGETHER, says=together),
            ]
        shard = begun(facts)
        return [
            Finding(
                kind="batch_fingerprint",
                step=facts.onset,
                cause="data",
                weight=UNSEEN if shard is not None and (shard.bounded or shard.chance <= RARELY) else CLEAN,
                absent=True,
                says="The batches since the onset look like those before it (repeats, distinct tokens, targets).",
            )
        ]
    first = int(facts.steps[int(np.argmax(facts.dirty))])
    stride = facts.trace.stride()
    if first > facts.onset + NEAR * stride:
        return [
            Finding(
                kind="batch_fingerprint",
                step=first,
                says=f"Batches look odd only from step {first} on, after the onset.",
            )
        ]
    share = _share(facts)
    worst = _worst(facts)
    if count >= 3 and share >= 0.6:
        return [
            Finding(
                kind="batch_fingerprint",
                step=first,
                cause="data",
                weight=0.9 if count >= 5 else 0.7,
                says=f"{count} of {facts.records} batches since step {first} are far off the baseline: {worst}.",
            )
        ]
    return [
        Finding(
            kind="batch_fingerprint",
            step=first,
            cause="data",
            weight=0.5 if first <= facts.onset + stride else 0.3,
            says=f"The batch of step {first} is far off the baseline: {worst}.",
        )
    ]


def _together(facts: Facts) -> str:
    """Return what says that the first batches since the onset are off as a whole though none is by itself, an empty text where they are not."""
    said = []
    for name in FINGERPRINT[:2]:
        usual = facts.usual.get(name)
        values = facts.trace.column(name)[facts.rows][: SEVERAL[1]]
        values = values[np.isfinite(values)]
        if usual is None or usual.noise <= 0 or usual.median <= 0 or len(values) < SEVERAL[0]:
            continue
        middle = float(np.median(values))
        error = 1.2533 * usual.noise / np.sqrt(len(values))
        if (
            abs(middle - usual.median) > OFF * error
            and max(middle / usual.median, usual.median / max(middle, 1e-12)) > APART
        ):
            said.append(f"{name} {middle:.4g} against {usual.median:.4g}")
    return (
        f"The batches since step {facts.onset} are off as a whole, though none by itself: {', '.join(said)}."
        if said
        else ""
    )


def _share(facts: Facts) -> float:
    """Return the share of dirty records between the first and the last dirty one: recovery afterwards does not dilute it."""
    places = np.flatnonzero(facts.dirty)
    return len(places) / float(places[-1] - places[0] + 1)


def _worst(facts: Facts) -> str:
    place = int(np.argmax(facts.dirty))
    said = []
    for name in FINGERPRINT:
        usual = facts.usual.get(name)
        value = facts.trace.column(name)[facts.rows][place]
        if usual is None or not np.isfinite(value):
            continue
        if abs(value - usual.median) > 4 * max(usual.noise, 1e-12):
            said.append(f"{name} {value:.4g} against {usual.median:.4g}")
    return ", ".join(said) or "several marks together"
