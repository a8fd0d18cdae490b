"""What a sentence says of a return: only what the row has seen."""

from __future__ import annotations

import pytest

from tests.rules.report.drawn import incident
from trainwarden.rules.report.marks import bad_until
from trainwarden.rules.report.words import graver, sentence


@pytest.mark.parametrize("verdict", ["outlier", "transient_spike", "slow_recovery"])
@pytest.mark.parametrize(("state", "closed"), [("confirmed", None), ("escalated", 160), ("not_recovered", 160)])
def test_nothing_is_said_to_be_back_that_was_not_seen_to_come_back(
    verdict: str, state: str, closed: int | None
) -> None:
    said = sentence(incident(100, verdict=verdict, state=state, closed_step=closed, severity="critical"))
    assert "was not seen to come back" in said
    assert "back to normal" not in said
    assert "came back" not in said
    assert ("up to step 160" in said) is (closed is not None)


def test_a_spike_that_healed_came_back() -> None:
    assert "the next one was back to normal" in sentence(incident(100, verdict="outlier"))
    assert "came back to its trend" in sentence(incident(100, verdict="transient_spike"))


def test_a_single_loss_that_healed_has_no_band_up_to_its_close() -> None:
    assert bad_until(incident(100, verdict="outlier", action="none", closed_step=900)) == 104
    assert bad_until(incident(100, verdict="transient_spike", action="none", closed_step=900)) == 900


def test_an_outlier_long_before_a_graver_incident_was_not_its_beginning() -> None:
    worse = incident(900, start_id="s0", opened_step=900, severity="critical")
    long_before = incident(100, verdict="outlier", severity="info", closed_step=900)
    assert graver(long_before, [long_before, worse]) is None
    shortly = incident(895, verdict="outlier", severity="info", closed_step=900)
    assert graver(shortly, [shortly, worse]) is worse
    coarse = incident(600, verdict="outlier", severity="info", closed_step=900, onset_uncertainty=100)
    assert graver(coarse, [coarse, worse]) is worse
