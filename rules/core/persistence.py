"""What persists, and what going back would only bring again: the observations that the policy rests on.

Only persistence justifies an ending action. Three things persist: weights that are no longer numbers, a loss that stays high, and a
shard that is dirty step after step while loss or gradient are abnormal; the last may be acted upon sooner, because each further step
does more damage and the evidence does not get better. What was overwritten persists too, weights by something else than updates or the second
moment by one gradient: the loss learns its way back slowly, and has not come back. Beside them a start that goes on otherwise than its parent left off persists,
and ranks that no longer hold one state.
"""

from __future__ import annotations

import numpy as np

from .attribution import Cause
from .facts import Facts
from .healing import stands_above
from .settings import Settings
from .trend import shift
from .verdict import LASTS_RECORDS, still_high

#: Findings that an earlier attempt broke alike, and causes of which a plan takes away what made it so.
REPEATS = ("repeated_step", "repeated_nearby", "repeated_age")
MENDED = ("data", "hardware")
#: The finding that replicas went apart.
DISAGREE = "ranks_disagree"
#: The finding that it began behind an evaluation or a checkpoint; a strong one says that it did so again and again (case A39).
AFTER = "after_event"
#: Findings that say what was overwritten in the state of the run (cases A38, A39).
OVERWRITTEN = ("weights_rewritten", "moment_jump")
#: A loss scale below this is dead: products with it underflow in float16, whose smallest number is 2**-24 (case C06).
DEAD_SCALE = 2.0**-24


def persists(facts: Facts, cause: Cause, mismatch: str, settings: Settings) -> str | None:
    """Return the sentence of what persists, or None. ``mismatch``: severity of a rule that found the resume wrong, or ""."""
    says = destroyed(facts, settings) or dirt(facts, cause, settings) or high(facts, settings)
    says = says or overwritten(facts, cause, settings)
    if says is None and mismatch == "critical" and "mismatch" in facts.offered:
        says = "It did not go on as the attempt before left off."
    if says is None and cause.name == "distributed" and facts.records >= settings.dirty_steps and useless(facts, cause):
        says = "The ranks no longer hold one state."
    return says


def destroyed(facts: Facts, settings: Settings) -> str | None:
    """Return the sentence that the weights are no longer numbers, or None."""
    need = max(2, settings.nonfinite_steps // facts.trace.stride())
    if facts.records >= need and facts.nonfinite[-need:].all():
        return f"The loss is not finite for {need} records in a row: the weights are no longer numbers."
    if facts.whose.bad >= need and facts.whose.bad_at == facts.now:
        return (
            f"The loss of some ranks alone is not finite for {facts.whose.bad} records: their weights are no numbers."
        )
    return None


def dirt(facts: Facts, cause: Cause, settings: Settings) -> str | None:
    """Return the sentence that batches stay dirty and do harm, or None."""
    if cause.name != "data" or not dirty_now(facts, settings.dirty_steps):
        return None
    return (
        f"{int(np.count_nonzero(facts.dirty))} batches since step {facts.onset} are dirty and it does not heal: "
        "each further step does more damage."
    )


def high(facts: Facts, settings: Settings) -> str | None:
    """Return the sentence that the loss stays high, or None."""
    if not still_high(facts, settings.persist_steps):
        return None
    return f"The loss stays above its trend for {settings.persist_steps} steps and does not come back."


def overwritten(facts: Facts, cause: Cause, settings: Settings) -> str | None:
    """Return the sentence that weights or moments were overwritten and the loss has not come back since, or None."""
    records = max(LASTS_RECORDS, settings.persist_steps // facts.trace.stride())
    if facts.trend is None or facts.records < records or cause.confidence < settings.confidence:
        return None
    seen = [one for one in cause.findings if one.kind in OVERWRITTEN and one.cause == cause.name and one.weight >= 0.5]
    if not seen or facts.nonfinite[-records:].any():
        return None
    found = shift(facts.trend, facts.steps[-records:], facts.loss[-records:])
    if found is None or not stands_above(found, facts.trend.noise):
        return None
    return f"{seen[0].says} The loss has not come back for {settings.persist_steps} steps."


def never_learned(facts: Facts, steps_run: int, settings: Settings) -> str | None:
    """Return the sentence that no loss of the run was ever finite, or None.

    A dead loss scale says so at once; without one, what comes within the warm-up may still be the way of a logger to begin.
    """
    if facts.resumed_from is not None or not facts.records or not facts.nonfinite.all():
        return None
    traces = [facts.trace, *facts.traces.values()] + ([] if facts.inherited is None else [facts.inherited])
    if any(np.isfinite(trace.column("loss")).any() for trace in traces):
        return None
    scales = facts.trace.column("loss_scale")[facts.rows]
    scales = scales[np.isfinite(scales)]
    if len(scales) and float(scales[-1]) < DEAD_SCALE:
        return f"The loss scale is {float(scales[-1]):.3g} and no loss was ever a number: nothing was learned."
    if steps_run <= settings.warmup_steps:
        return None
    return "No loss of this run was ever a number: nothing was learned."


def dirty_now(facts: Facts, steps: int) -> bool:
    """Say whether data stayed dirty for ``steps`` up to now, with loss or gradient abnormal and no sign of healing."""
    records = max(3, steps // facts.trace.stride())
    if facts.records < records:
        return False
    dirty = facts.dirty[-records:]
    odd = (facts.loss_high | facts.grad_high)[-records:]
    recent = records // 2
    return bool(
        np.count_nonzero(dirty) >= 0.8 * records
        and np.count_nonzero(odd) >= 0.6 * records
        and np.count_nonzero(odd[-recent:]) >= 0.6 * recent
    )


def useless(facts: Facts, cause: Cause) -> str | None:
    """Say why going back would only bring it again: the attempt before broke alike, or the ranks no longer hold one state."""
    for finding in cause.findings:
        if finding.kind in REPEATS and cause.name not in MENDED:
            return f"{finding.says} Going back once more would repeat it. {cause.cheapest_test}"
        if finding.kind == DISAGREE and cause.name == "distributed":
            return f"{finding.says} On the same hosts and libraries it would come again. {cause.cheapest_test}"
        if finding.kind == "same_place" and cause.name == "hardware" and not facts.repeated_hosts:
            return f"{finding.says} There is no other host to go to. {cause.cheapest_test}"
        if finding.kind == AFTER and finding.cause == cause.name and finding.weight >= 0.5:
            return f"{finding.says} Going back runs into the next one. {cause.cheapest_test}"
    return None
