"""The shape of what happened: from how long it lasts and the level after it, not from its size (design §4.1).

A rule may offer a shape that the loss does not show (a collapse of the gradient, a period); the loss's own shapes are decided here.
"""

from __future__ import annotations

import numpy as np

from .facts import Facts
from .healing import ERRORS, stands_above
from .trend import shift

#: Shapes that only a rule can see; the earlier one wins.
SEEN_BY_RULES = ("mismatch", "stall", "scale_collapse", "grad_collapse", "periodic_spikes", "recurring_spikes", "drift")
#: Those of them that stand for many events.
RECURRING = ("periodic_spikes", "recurring_spikes")
#: Steps of abnormal loss beyond which a healed incident was a slow recovery (case A04: thousands; A01: thirty).
SLOW_STEPS = 200
#: Steps of abnormal loss, not on its way back or with dirty data going on, from which it is no transient.
STAYS_STEPS = 10
#: Records of abnormal loss below which nothing has lasted, however many steps each covers.
LASTS_RECORDS = 5
#: An excess that grows by this factor between the halves of what was seen runs away.
RUNAWAY = 1.5
#: Records behind the onset over which a rule's word on the level is checked: as many as its window has.
LEVEL_RECORDS = 200
#: Records that tell whether a loss comes back, and the part of its excess that it must have lost from one half of them to the other.
BACK_RECORDS, BACK = 100, 0.02
#: Records that a shape over time needs.
ENOUGH = 20
#: Verdicts that page: they do not pass by themselves.
PERSISTENT = ("level_shift", "divergence", "nonfinite", "grad_collapse", "scale_collapse", "stall", "mismatch")

#: Verdicts of rules that judgement checks against its own trend.
LEVEL_CLAIMS = ("level_shift", "divergence")
#: Verdicts of rules that speak of the run and not of a moment.
STANDING = ("periodic_spikes", "recurring_spikes", "drift", "mismatch")

#: Verdicts that speak of nothing but a signal's size: a change of unit would explain them.
SIZES = (
    "outlier",
    "transient_spike",
    "slow_recovery",
    "level_shift",
    "divergence",
    "grad_surge",
    "recurring_spikes",
    "periodic_spikes",
    "drift",
    "other",
)


def held_back(doubted: bool, verdict: str) -> bool:
    """Say whether nobody is told of this verdict yet: the unit of a signal is in doubt, and a change of it would explain it."""
    return doubted and verdict in SIZES


def shape(facts: Facts, healed: bool, settled: bool, persist_steps: int) -> str:
    """Return the verdict. ``healed``: the level is back; ``settled``: it stays above the trend without alerts."""
    if facts.nonfinite.any() or ("nonfinite" in facts.offered and not facts.loss_high.any()):
        return "nonfinite"
    seen = [name for name in SEEN_BY_RULES if name in facts.offered]
    if settled:
        return "level_shift"
    if (not seen or seen[0] == "drift") and not healed and claimed_level(facts) and not _runs_away(facts):
        return "level_shift"
    if seen and not _runs_away(facts):
        return seen[0]
    if not facts.loss_high.any():
        if facts.grad_high.any():
            return "grad_surge"
        return facts.offered[0] if facts.offered else "other"
    lasted = lasting(facts)
    stride = facts.trace.stride()
    if healed:
        if lasted <= stride:
            return "outlier"
        return "transient_spike" if lasted <= SLOW_STEPS else "slow_recovery"
    if _runs_away(facts):
        return "divergence"
    stays = still_high(facts, STAYS_STEPS) or (facts.loss_high[-3:].all() and facts.dirty[-3:].all())
    if (persisted(facts, persist_steps) and _most_high(facts)) or (lasted >= STAYS_STEPS and stays):
        return "slow_recovery" if coming_back(facts) else "level_shift"
    return "outlier" if lasted <= stride and facts.now > facts.onset + 3 * stride else "transient_spike"


def claimed_level(facts: Facts) -> bool:
    """Say whether a rule saw the level shift and the trend bears it out, though single records hardly stand out of their noise.

    The records behind the onset tell: the farther the trend is extrapolated, the less it says of so little.
    """
    if not {"level_shift", "drift"} & set(facts.offered) or facts.trend is None or facts.records < LEVEL_RECORDS // 4:
        return False
    found = shift(facts.trend, facts.steps[:LEVEL_RECORDS], facts.loss[:LEVEL_RECORDS])
    return found is not None and stands_above(found, facts.trend.noise)


def lasting(facts: Facts) -> int:
    """Return the steps from the first to the last record with an abnormal loss, both included."""
    places = np.flatnonzero(facts.loss_high)
    if len(places) == 0:
        return 0
    return int(facts.steps[places[-1]] - facts.steps[places[0]]) + facts.trace.stride()


def _most_high(facts: Facts) -> bool:
    """Say whether most records between the first and the last abnormal one are; two hard batches far apart are no level."""
    places = np.flatnonzero(facts.loss_high)
    return 2 * len(places) >= int(places[-1] - places[0]) + 1


def persisted(facts: Facts, steps: int) -> bool:
    """Say whether the loss was abnormal over ``steps`` and in more than a few records: one record may cover hundreds."""
    return lasting(facts) >= steps and int(np.count_nonzero(facts.loss_high)) >= LASTS_RECORDS


def mostly_high(facts: Facts, records: int = 200) -> bool:
    """Say whether the loss was abnormal in most of the newest records."""
    recent = facts.loss_high[-records:]
    return 2 * int(np.count_nonzero(recent)) > len(recent)


def still_high(facts: Facts, steps: int) -> bool:
    """Say whether the loss was abnormal in nine of ten records of the last ``steps`` and is not on its way back."""
    stride = facts.trace.stride()
    records = max(LASTS_RECORDS, steps // stride)
    if facts.records < records:
        return False
    recent = facts.loss_high[-records:]
    if np.count_nonzero(recent) < 0.9 * records:
        return False
    excess = facts.excess[-records:]
    finite = np.isfinite(excess)
    if np.count_nonzero(finite) < records // 2:
        return True
    half = records // 2
    older, newer = excess[:half][finite[:half]], excess[half:][finite[half:]]
    if len(older) == 0 or len(newer) == 0:
        return True
    return float(np.median(newer)) > 0.75 * float(np.median(older))


def coming_back(facts: Facts) -> bool:
    """Say whether a spike is over and the loss comes down from it step by step, slowly as it may (case A04: over two thousand steps).

    The newer half of the last hundred records must lie below the older one by more than their errors and by a part of the excess, and
    all of them far below the highest.
    """
    recent = facts.excess[-BACK_RECORDS:]
    half = len(recent) // 2
    older, newer = recent[:half][np.isfinite(recent[:half])], recent[half:][np.isfinite(recent[half:])]
    if min(len(older), len(newer)) < BACK_RECORDS // 4 or facts.trend is None:
        return False
    error = ERRORS * float(np.sqrt(2 * facts.trend.correlation / min(len(older), len(newer))))
    fallen = float(np.mean(older)) - float(np.mean(newer))
    return fallen > max(error, BACK * float(np.mean(older))) and float(np.mean(newer)) > error


def _runs_away(facts: Facts) -> bool:
    if facts.records < ENOUGH or not facts.loss_high[-3:].all():
        return False
    excess = facts.excess[np.isfinite(facts.excess)]
    if len(excess) < ENOUGH:
        return False
    half = len(excess) // 2
    older, newer = float(np.median(excess[:half])), float(np.median(excess[half:]))
    return newer > max(RUNAWAY * older, 8.0)
