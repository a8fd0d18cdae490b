"""Which shard the run began to read where an incident began, how much of a coincidence that is, and whether it ended with the shard.

A shard of few steps begins near every onset. One of fifty begins within a given four steps one time in twelve, one of a thousand hardly
ever by chance.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from .facts import Facts

#: Steps before the onset, and behind it, at which a shard that begins may have begun the incident.
NEAR, BEHIND = 2, 1
#: A shard must last for more steps than this.
LEAST_STEPS = 4
#: Records behind the shard's end that tell how it is there, and the shares of abnormal ones within the shard and behind it.
ENOUGH, WITHIN, AFTERWARDS = 8, 0.6, 0.25


@dataclass(frozen=True, slots=True)
class Begun:
    """A shard that began near the onset: its name, the step, by what chance one does, and the step behind its end where it is over.

    ``bounded``: most records of the shard were abnormal and those behind it are not. None where that is not known yet.
    """

    name: str
    step: int
    chance: float
    bounded: bool | None


def begun(facts: Facts) -> Begun | None:
    """Return the shard whose first position was consumed from two steps before the onset to one behind it, None where there is none."""
    stride = facts.trace.stride()
    rows = facts.trace.rows(facts.onset - NEAR * stride, facts.onset + BEHIND * stride)
    for row in range(rows.start, rows.stop):
        samples = facts.trace.samples(row)
        each = sum(end - first for first, end in samples)
        for span in facts.trace.shards(row):
            if not each or span.end - span.first <= LEAST_STEPS * each:
                continue  # no extent of a whole shard, or so small that a boundary is always near
            if any(first <= span.first < end for first, end in samples):
                chance = min(1.0, (NEAR + BEHIND + 1) * stride * each / (span.end - span.first))
                step = int(facts.trace.steps[row])
                return Begun(span.name, step, chance, _bounded(facts, span.end))
    return None


def _bounded(facts: Facts, end: int) -> bool | None:
    """Say whether what is abnormal lies before position ``end`` of the same pass."""
    behind = facts.trace.sample_first[: len(facts.trace)][facts.rows] >= end
    if np.count_nonzero(behind) < ENOUGH or not (~behind).any():
        return None
    odd = facts.loss_high | facts.grad_high
    return bool(np.mean(odd[~behind]) >= WITHIN and np.mean(odd[behind]) <= AFTERWARDS)
