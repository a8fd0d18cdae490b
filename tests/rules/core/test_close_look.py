"""A rollback of a numeric cause has the steps around the onset looked at closely, and what is found there becomes evidence."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import pytest

from tests.rules.core.made_up_facts import facts
from tests.rules.core.runs import (
    BEGIN,
    Attempt,
    acting,
    core,
    dirty,
    not_a_number,
    only,
    plan_in,
    shifted,
    spike,
    under,
)
from trainwarden.plan import CloseLook, check_plan
from trainwarden.record import Event, Step
from trainwarden.rules.core.broken import Broken
from trainwarden.rules.core.feed import dump, load
from trainwarden.rules.core.planning import close_look
from trainwarden.rules.report.words import decision

FOUND = {
    "state": "found",
    "module": "transformer.h.3.mlp",
    "stage": "forward",
    "op": "log",
    "at": "train.py:88",
    "traceback": ["train.py:88 in forward: y = torch.log(x)"],
}
SAYS = (
    "First non-finite: the output of transformer.h.3.mlp at step 401, in the forward pass; made by log at train.py:88."
)


@dataclass
class Looking(Attempt):
    """An attempt whose exporter looks closely, and tells what it found before the record of the step."""

    told: dict[int, dict[str, Any]] = field(default_factory=dict)

    def lines(self) -> Iterator[Step | Event]:
        late = 0
        for line in super().lines():
            if isinstance(line, Step) and line.step in self.told:
                yield Event(
                    kind="anomaly", time=line.time, seq=line.seq + late, step=line.step, fields=self.told[line.step]
                )
                late += 1
            line.seq += late
            yield line


def broken(**start: Any) -> Any:
    played = acting()
    played.play(
        Attempt(last=420, changes=[not_a_number(401)], start={"beta2": 0.98, "betas": [0.9, 0.98], **start}, end=None),
        live=True,
    )
    return played


def test_the_plan_of_a_numeric_cause_names_the_steps_around_the_onset_and_says_why() -> None:
    incident = only(broken().incidents)
    plan = plan_in(incident)
    check_plan(plan)
    assert incident["cause"]["name"] == "numeric"
    assert plan.anomaly == CloseLook(first_step=399, steps=13)
    assert plan.reasons["anomaly"].startswith("Steps 399 to 411 are looked at closely: something at step 401")
    assert "look closely at steps 399 to 411" in decision(incident)


@pytest.mark.parametrize("change", [dirty(351, 400), shifted(600, 0.25)])
def test_other_causes_have_nothing_looked_at(change: Any) -> None:
    played = acting()
    played.play(Attempt(last=1000, changes=[change], end="signal"), live=True)
    plans = [plan_in(one) for one in played.incidents if one["plan"] is not None]
    assert plans
    assert all(plan.anomaly is None and "anomaly" not in plan.reasons for plan in plans)


def test_only_a_numeric_cause_with_something_that_was_not_finite_has_steps_looked_at_and_none_before_the_target() -> (
    None
):
    broke, spiked = facts(not_a_number(301)), facts(spike({301: 3.0}))
    assert close_look(broke, "numeric", 250) == CloseLook(first_step=299, steps=13)
    assert close_look(broke, "numeric", 300) == CloseLook(first_step=301, steps=11)
    assert close_look(broke, "data", 250) is None
    assert close_look(spiked, "numeric", 250) is None
    named = replace(spiked, broken=(Broken(301, 0, "h.3.mlp", "backward"),))
    assert close_look(named, "numeric", 250) == CloseLook(first_step=299, steps=13)


def test_what_the_look_found_is_the_evidence_of_the_incident_and_stands_in_its_summary() -> None:
    run = core()
    run.play(Looking(last=420, changes=[not_a_number(401)], told={401: FOUND}))
    incident = only(run.incidents)
    assert [one["says"] for one in incident["evidence"] if one["kind"] == "close_look"] == [SAYS]
    assert SAYS[1:-1] in incident["summary"]


def test_a_finding_of_long_before_the_onset_is_not_the_incidents() -> None:
    run = core()
    run.play(Looking(last=420, changes=[not_a_number(401)], told={300: FOUND}))
    assert all(one["kind"] != "close_look" for one in only(run.incidents)["evidence"])


def test_a_look_that_could_not_be_taken_is_told_and_the_plan_counts_as_applied_all_the_same() -> None:
    played = broken()
    plan = plan_in(only(played.incidents))
    assert plan.target is not None
    refused = {"anomaly": "steps 399 to 411 lie before step 500, the first of this attempt"}
    following = Attempt(
        number=1,
        first=plan.target.step + 1,
        last=plan.target.step + 8,
        start=under(plan, not_applied=refused),
        began=BEGIN + 10_000,
        end=None,
    )
    played.play(following, live=True)
    incident = next(one for one in played.incidents if one["attempt"] == 0)
    says = [line["says"] for line in incident["timeline"]]
    assert f"Not applied: anomaly: {refused['anomaly']}." in says
    assert not any("Plan was not applied" in line for line in says)
    assert incident["state"] == "verifying"


def test_what_was_found_outlives_a_restart_of_the_daemon() -> None:
    run = core()
    run.play(Looking(last=402, changes=[not_a_number(401)], told={401: FOUND}, end=None))
    state = run.state
    again = load(dump(state), state.settings, state.pack, state.engines)
    (kept,) = [one.alive.looked for one in again.memory.runs.values() if one.alive is not None]
    assert [(one.step, one.op) for one in kept] == [(401, "log")]
