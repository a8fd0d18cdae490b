"""What a guard left out is neither a loss that broke the model nor an abnormal gradient, and tells nothing of the loss scale."""

from __future__ import annotations

import math

import numpy as np
import pytest

from trainwarden.record import Step, Value
from trainwarden.rules.core.baseline import Baseline
from trainwarden.rules.core.facts import high_gradient, high_loss
from trainwarden.rules.core.trace import Trace


def trace(guarded: bool, cause: str = "nonfinite") -> Trace:
    """Return twenty records, the loss and the norm of the eleventh NaN; with a guard, left out."""
    found = Trace(limit=100)
    for step in range(1, 21):
        bad = step == 11
        signals: dict[str, Value] = {"loss": math.nan if bad else 2.0, "grad_norm": {"all": math.nan if bad else 1.0}}
        signals["nonfinite"] = {"loss": float(bad)}
        if guarded:
            signals["guard_skipped_steps"] = {cause: float(bad)}
            signals["skipped"] = float(bad)
        found.append(Step(seq=step, step=step, time=float(step), signals=signals))
    return found


USUAL = {"grad_norm": Baseline(median=1.0, noise=0.1, n=100)}


@pytest.mark.parametrize("guarded", [True, False])
def test_a_loss_that_is_not_finite_counts_unless_its_update_was_left_out(guarded: bool) -> None:
    whole = slice(0, 20)
    _, high, nonfinite = high_loss(trace(guarded), whole, None)
    assert nonfinite.tolist() == [place == 10 and not guarded for place in range(20)]
    assert high.tolist() == nonfinite.tolist()
    assert high_gradient(trace(guarded), whole, USUAL).tolist() == nonfinite.tolist()


@pytest.mark.parametrize("cause", ["nonfinite", "limit", "surge"])
def test_whatever_the_cause_it_was_left_out(cause: str) -> None:
    assert np.flatnonzero(trace(True, cause).left_out(slice(0, 20))).tolist() == [10]
    assert not trace(False).left_out(slice(5, 15)).any()
