"""What a sentence says of a return: only what the row has seen."""

from __future__ import annotations

import re
from typing import Any, get_args

import pytest

from tests.rules.report.drawn import incident
from trainwarden.rules.core.gates import GATES
from trainwarden.rules.core.state import IncidentState
from trainwarden.rules.report.marks import bad_until
from trainwarden.rules.report.words import CLAUSES, HELD, NOT_ENOUGH, SEVERITIES, decision, graver, sentence


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


@pytest.mark.parametrize(
    ("told", "says"),
    [
        ({"severity": "info"}, "No action was decided: it only informs."),
        ({"held_by": "warm_up"}, "No action was decided: nothing is done within the attempt's warm-up."),
        ({"held_by": "cool_down"}, "No action was decided: the last rollback is too recent."),
        ({"state": "recovered"}, "before it had persisted"),
        ({"state": "dismissed"}, "it was dismissed"),
        ({"verdict": "mismatch", "state": "watching"}, "which going back does not mend"),
        ({"state": "inconclusive", "verdict": "drift"}, "is by itself not worth a rollback"),
    ],
)
def test_where_no_action_was_decided_the_reason_is_said(told: dict[str, Any], says: str) -> None:
    assert says in decision({"severity": "critical", "action": "none", **told})


#: What must not be said under a verdict's sentence: it would deny it.
DENIES = {
    "level_shift": r"no loss that stays|single|by itself|persisted|over before",
    "divergence": r"no loss that stays|way back|by itself|persisted|over before",
    "nonfinite": r"no numbers|numbers that stay|high",
    "grad_surge": r"the loss (rose|stayed)|high",
    "grad_collapse": r"no loss that stays|way back|persisted|over before",
    "recurring_spikes": r"single|persisted|over before",
    "periodic_spikes": r"single|persisted|over before",
    "drift": r"persisted|over before|single",
    "scale_collapse": r"persisted|over before|single",
    "slow_recovery": r"persisted|over before|single",
    "stall": r"the loss",
    "mismatch": r"the loss",
}
OF_STATES = {"recovered": "recovered|was over", "dismissed": "was dismissed", "escalated": "for a person"}


@pytest.mark.parametrize("verdict", CLAUSES)
@pytest.mark.parametrize("severity", SEVERITIES)
@pytest.mark.parametrize("state", get_args(IncidentState))
def test_the_reason_for_no_action_never_denies_the_verdict_the_severity_or_the_state(
    verdict: str, severity: str, state: str
) -> None:
    row = incident(100, verdict=verdict, severity=severity, state=state, action="none", plan=None)
    said = decision(row)
    reason = said.removeprefix("No action was decided: ")
    assert reason != said
    denied = DENIES.get(verdict)
    assert denied is None or not re.search(denied, reason), f"{sentence(row)} {reason}"
    if "was not seen to come back" in sentence(row):
        assert not re.search("comes back|came back|single|was over", reason)
    assert ("only informs" in reason) is (severity == "info" and state != "dismissed")
    for name, words in OF_STATES.items():
        if name != state:
            assert not re.search(words, reason), f"{state}: {reason}"
        elif severity != "info" or state == "dismissed":
            assert re.search(words, reason), f"{state}: {reason}"
    # A state that tells nothing leaves the verdict as the reason, and each has one of its own.
    if severity != "info" and state not in OF_STATES and verdict != "other":
        assert reason == f"{NOT_ENOUGH[verdict]}."


@pytest.mark.parametrize(
    ("held", "says"),
    [
        ("mode", "the policy is to observe only"),
        ("no_receiver", "there is no receiver"),
        ("approval", "a person must approve it"),
    ],
)
def test_what_holds_a_decision_back_is_said_in_words_with_its_name(held: str, says: str) -> None:
    found = decision({"action": "rollback", "held_by": held, "plan": {}})
    assert f"Held back ({held.replace('_', ' ')}): {says}" in found


def test_every_gate_has_its_words() -> None:
    assert {gate.name for gate in GATES} <= set(HELD)
    assert {"mode", "stale", "warm_up", "cool_down", "maintenance"} <= {gate.name for gate in GATES}
