"""What the loss should be given where the batch's samples are from: a batch of a hard source is high, and nothing is wrong with it.

The exporter tells the mix of sources and the loss that such a mix should have, where batches say their source. It informs: whether
the sources were meant to be mixed like this, no number tells.
"""

from __future__ import annotations

import numpy as np

from trainwarden.rules.core.baseline import baseline
from trainwarden.rules.core.facts import LOSS_SDS, TREND_RECORDS, Evidence, Facts, Finding, NotPossible

#: What is said where this line looked and found nothing.
CLEAR = "The loss is what its sources lead to expect, or the mix explains a part of it."

#: Shares of what the loss lies above its trend by that the mix explains: all but a rest, or next to nothing.
EXPLAINED, UNEXPLAINED = 0.7, 0.3


def find(facts: Facts) -> Evidence:
    """Return at most one finding: the mix explains the first high loss, or it does not."""
    if facts.trend is None:
        return NotPossible("there is no trend of the loss before the onset")
    if not facts.trace.measured("loss_expected").any():
        return NotPossible("no expected loss is recorded: the batches do not say their sources")
    expected = facts.trace.column("loss_expected")[facts.rows]
    high = facts.loss_high & np.isfinite(facts.loss) & np.isfinite(expected)
    if not high.any():
        return []
    place = int(np.argmax(high))
    step, loss, foretold = int(facts.steps[place]), float(facts.loss[place]), float(expected[place])
    trend = float(facts.trend.at(facts.steps[place : place + 1])[0])
    above = loss - trend
    if above <= 0:
        return []
    explained = (foretold - trend) / above
    if explained >= EXPLAINED or loss - foretold <= LOSS_SDS * _noise(facts):
        mix = _mix(facts, place)
        says = (
            f"The loss of step {step} is {loss:.4g}, and {foretold:.4g} was to be expected of its sources{mix}: a hard batch, not a "
            "harmful one."
        )
        test = f"Compare the mix of sources at step {step} with the one that was meant: trainwarden data show --step {step}."
        return [Finding(kind="expected_loss", step=step, says=says, test=test)]
    if explained > UNEXPLAINED:
        return []
    says = f"The batch's sources do not explain the loss of step {step}: {foretold:.4g} was to be expected of them, and it is {loss:.4g}."
    return [Finding(kind="expected_loss", step=step, says=says)]


def _noise(facts: Facts) -> float:
    """Return by how much a loss usually differs from what is expected of its sources, in records before the onset."""
    end = len(facts.trace) - len(facts.steps)
    rows = slice(max(0, end - TREND_RECORDS), end)
    off = facts.trace.column("loss")[rows] - facts.trace.column("loss_expected")[rows]
    found = baseline(off[np.isfinite(off)])
    return 0.0 if found is None else found.noise


def _mix(facts: Facts, place: int) -> str:
    """Return which source the batch has more of than usual, as words in brackets; an empty text where no record names any.

    Nothing where there are several ranks: the loss is of all their batches, and a record names the sources of one.
    """
    if facts.whose.of_ranks > 1:
        return ""
    end = len(facts.trace) - len(facts.steps)
    before = slice(max(0, end - TREND_RECORDS), end)
    most: tuple[float, str, float, float] | None = None
    for source in facts.trace.sources():
        shares = np.nan_to_num(facts.trace.column(f"source_share/{source}"))
        usual = float(shares[before].mean()) if end else 0.0
        now = float(shares[facts.rows][place])
        if most is None or now - usual > most[0]:
            most = (now - usual, source, now, usual)
    if most is None or most[0] <= 0:
        return ""
    return f" ({100 * most[2]:.0f} % {most[1]}, usually {100 * most[3]:.0f} %)"
