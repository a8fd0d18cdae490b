"""Triage lists every check from cheap to dear and is kept with the incident."""

from __future__ import annotations

import json
from dataclasses import replace

from tests.rules.core.made_up_facts import at, facts
from tests.rules.core.runs import Attempt, core, dirty, only
from trainwarden.rules.core.attribution import LINES, attribute
from trainwarden.rules.core.facts import Earlier
from trainwarden.rules.core.reasoning import Reasoned, reasoned, tried
from trainwarden.rules.core.resumed import Planned
from trainwarden.rules.core.triage import STAGES, TRIAL, triage

HIGH = at(range(301, 321), loss=lambda old: old + 1.0)


def test_checks_stand_from_cheap_to_dear_and_each_says_what_came_of_it() -> None:
    one = facts(HIGH)
    found = triage(one, "level_shift", attribute(one).answers)
    assert list(dict.fromkeys(check.stage for check in found)) == list(STAGES)
    assert found[0].says == "The shape is level shift."
    assert all(check.says and check.outcome in ("found", "ruled_out", "not_possible") for check in found)
    assert len(found) == 2 + len(LINES)


def test_without_a_trend_the_shape_cannot_be_told() -> None:
    one = replace(facts(HIGH), trend=None)
    assert triage(one, "other", attribute(one).answers)[0].outcome == "not_possible"


def test_a_trial_of_the_rate_takes_an_attempt_with_another_rate() -> None:
    one = facts(HIGH)
    (plain,) = [check for check in triage(one, "level_shift", attribute(one).answers) if check.check == TRIAL]
    assert plain.outcome == "not_possible"
    slower = replace(one, planned=Planned(0.5, ("factor",)), earlier=(Earlier("inc_0", 0, 301, None, "data"),))
    (again,) = [check for check in triage(slower, "level_shift", attribute(slower).answers) if check.check == TRIAL]
    assert again.outcome == "ruled_out"
    assert "attempt 0" in again.says


def test_a_trial_that_a_verification_answers_is_told_then() -> None:
    one = facts(HIGH)
    known = reasoned(Reasoned(), one, attribute(one), "level_shift")

    def trial(state: str, factor: float = 0.5) -> str:
        return next(check.outcome for check in tried(known, factor, state).triage if check.check == TRIAL)

    assert (trial("recovered"), trial("not_recovered")) == ("found", "ruled_out")
    assert trial("recovered", factor=1.0) == trial("inconclusive") == "not_possible"


def test_triage_order_cost_and_the_sum_in_words_are_in_the_row_of_an_incident() -> None:
    played = core()
    played.play(Attempt(last=420, changes=[dirty(301, 420)], end=None))
    row = only(played.incidents)
    json.dumps(row, allow_nan=False)
    assert {check["stage"] for check in row["triage"]} == set(STAGES)
    found = {check["check"]: check["outcome"] for check in row["triage"]}
    assert found["batch_fingerprint"] == "found"
    assert found["device_errors"] == "not_possible"
    assert row["cause"]["explained"].startswith("For data batch fingerprint (0.90)")
    assert row["order"]["first"][0]["step"] == 301
    assert row["suspect_shards"][0]["name"] == "shard-006"
    assert any(item["speaks"].get("data") == 0.9 for item in row["evidence"])
    assert row["cost"]["thrown"] is False
