"""What would have prevented an incident, from the run's own numbers, and only where it applies.

What helps has its mark in the records: a clipping threshold (how often it clips in calm steps, and how far the surge was beyond), a warm-up
(how long it was, and how soon behind its top it broke), the gradient shrink of the embedding (how much of the surge lay there; GLM-130B,
arXiv 2210.02414), and the loss scaler (to which scale it had to fall). Checkpoints that are too rare are planning's word (:mod:`.spacing`).
"""

from __future__ import annotations

import numpy as np
from msgspec import Struct

from .counted import counted
from .facts import Facts
from .warmup import warm_up

#: Records before the onset that tell how calm steps are clipped, at least and at most.
ENOUGH, CALM = 50, 600
#: The quantile of the calm norms at which a threshold clips what is not calm, and how far the surge must be beyond it.
QUANTILE, BEYOND = 0.99, 2.0
#: Share of calm steps clipped from which a threshold is at work.
WORKS = 0.01
#: Share of the warm-up's length behind its top within which a longer one would have helped.
SOON = 1.0
#: Share of the surge of the squared norm that must lie in the embedding.
EMBEDDED = 0.5
#: Halvings of the loss scale from which it began too high.
HALVINGS = 3.0


class Advice(Struct, frozen=True):
    """What would have helped (``clipping``, ``warm_up``, ``embedding_shrink``, ``loss_scaler``), and why it would."""

    what: str
    says: str


def prevention(facts: Facts, cause: str) -> list[Advice]:
    """Return what would have helped; nothing where nothing applies."""
    found = [
        ("clipping", _clipping(facts)),
        ("warm_up", _warm_up(facts, cause)),
        ("embedding_shrink", _embedding(facts)),
        ("loss_scaler", _scaler(facts)),
    ]
    return [Advice(what, says) for what, says in found if says]


def _clipping(facts: Facts) -> str:
    """A gradient that surged: was there a threshold, and did it do anything before?"""
    calm = facts.before("grad_norm", CALM)
    since = facts.trace.column("grad_norm")[facts.rows]
    since = since[np.isfinite(since)]
    if len(calm) < ENOUGH or not len(since) or not facts.grad_high.any():
        return ""
    usual, surge = float(np.quantile(calm, QUANTILE)), float(np.max(since))
    if surge < BEYOND * usual:
        return ""
    fitting = f"{usual:.3g}, the norm of the highest of a hundred calm steps"
    with np.errstate(divide="ignore", invalid="ignore"):
        thresholds = facts.trace.column("grad_norm") / facts.trace.column("clip_ratio")
    thresholds = thresholds[np.isfinite(thresholds)]
    ratios = facts.before("clip_ratio", CALM)
    if not len(thresholds) or not len(ratios):
        return (
            f"No clipping is recorded, and the gradient norm reached {surge:.3g}. A threshold of {fitting}, would have made it "
            f"{surge / usual:.2g} times smaller."
        )
    threshold, clipped = float(np.median(thresholds)), float(np.mean(ratios > 1))
    if clipped >= WORKS or threshold <= usual:
        return ""
    how = "never clipped a step" if clipped == 0 else f"clipped {100 * clipped:.2g} % of the steps"
    return (
        f"The clipping threshold of {threshold:.3g} {how} in the {len(ratios)} records before the onset, and the gradient norm reached {surge:.3g}. A "
        f"threshold of {fitting}, would have let {threshold / usual:.2g} times less of it through."
    )


def _warm_up(facts: Facts, cause: str) -> str:
    """A rate that was too much for the model at the top of its warm-up, or on the way there."""
    if cause not in ("learning_rate", "optimizer_state", "model", "undetermined"):
        return ""
    found = warm_up(facts)
    if found is None or not facts.loss_high.any():
        return ""
    behind = facts.onset - found.top
    if behind > SOON * found.steps:
        return ""
    borne = facts.before("lr", 50)
    rate = (
        f", and {borne[0]:.3g} was borne {counted(len(borne), 'record')} before" if behind == 0 and len(borne) else ""
    )
    where = "on its way up" if behind == 0 else f"{counted(behind, 'step')} behind its top"
    return (
        f"The learning rate rose to {found.high:.3g} within {counted(found.steps, 'step')} and it broke {where}{rate}: a warm-up over "
        f"{2 * found.steps} steps, or a lower top."
    )


def _embedding(facts: Facts) -> str:
    """A surge that lies in the embedding's gradient."""
    part, whole = facts.trace.column("grad_norm_embedding")[facts.rows], facts.trace.column("grad_norm")[facts.rows]
    before, usual = facts.before("grad_norm_embedding"), facts.usual.get("grad_norm")
    known = np.isfinite(part) & np.isfinite(whole) & facts.grad_high
    if not known.any() or len(before) < ENOUGH or usual is None:
        return ""
    place = int(np.flatnonzero(known)[np.argmax(whole[known])])
    grown = float(whole[place]) ** 2 - usual.median**2
    share = (float(part[place]) ** 2 - float(np.median(before)) ** 2) / grown if grown > 0 else 0.0
    if share < EMBEDDED:
        return ""
    return (
        f"{100 * min(share, 1.0):.0f} % of what the squared gradient norm grew by at step {int(facts.steps[place])} lay in the embedding: "
        "shrinking its gradient to a tenth (guard.shrink_embeddings) leaves the rest of the model out of it."
    )


def _scaler(facts: Facts) -> str:
    """A loss scale that fell time and again."""
    scale = facts.trace.column("loss_scale")
    first = facts.trace.row(facts.onset - 10 * facts.trace.stride())
    known = np.isfinite(scale[first:]) & (scale[first:] > 0)
    values = scale[first:][known]
    if len(values) < 2:
        return ""
    lowest = int(np.argmin(values))
    top, low = float(np.max(values[: lowest + 1])), float(values[lowest])
    halvings = float(np.log2(top / low))
    if halvings < HALVINGS:
        return ""
    return (
        f"The loss scale fell from {top:.6g} to {low:.6g}, by {counted(halvings, 'halving')}, each a step without an update. A scaler that "
        f"begins at {low:.6g} and grows half as often would have left fewer out; bfloat16 needs none."
    )
