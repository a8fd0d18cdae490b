"""A probe in a plan: what it may ask, and that plans from before there were any are still read."""

from __future__ import annotations

import json
from typing import Any

import pytest

from trainwarden import plan as plans
from trainwarden.plan import Applied, Plan, PlanError, Probe, Target

TARGET = Target(attempt=0, step=300, path="c/300")
ASKED = Probe(kind="replay", first_step=350, steps=30, samples=[(5600, 5616)])


def whole(**changed: Any) -> Plan:
    fields: dict[str, Any] = {
        "plan_id": "p",
        "run_uid": "u",
        "for_attempt": 1,
        "action": "probe",
        "target": TARGET,
        "probe": ASKED,
    }
    return Plan(**{**fields, **changed})


def test_a_probe_is_read_as_it_was_written_and_ends_where_it_says() -> None:
    plan = plans.decode_plan(plans.encode(whole()))
    assert plan == whole()
    assert plan.probe is not None
    assert plan.probe.end == 380
    report = Applied(plan_id="p", start_step=301, target=TARGET, probe=ASKED)
    assert json.loads(plans.encode(report))["probe"]["kind"] == "replay"


def test_a_plan_from_before_there_were_probes_is_read() -> None:
    older = json.loads(plans.encode(whole(action="rollback", probe=None)))
    assert plans.decode_plan(json.dumps(older).encode()).probe is None
    del older["probe"]
    assert plans.decode_plan(json.dumps(older).encode()).probe is None


def garbled(**changed: Any) -> bytes:
    raw = json.loads(plans.encode(whole()))
    raw["probe"].update(changed)
    return json.dumps(raw).encode()


@pytest.mark.parametrize(
    ("data", "says"),
    [
        (garbled(kind="guess"), r"\$\.probe\.kind"),
        (garbled(steps=0), r"probe\.steps: 0 is not in 1 to"),
        (garbled(steps="many"), r"\$\.probe\.steps"),
        (garbled(first_step=300), r"probe\.first_step: 300 is not behind the target's step 300"),
        (garbled(samples=[[9, 3]]), r"probe\.samples: \[9, 3\)"),
        (garbled(epoch=-1), r"probe\.epoch"),
        (garbled(skip_everything=True), "skip_everything"),
        (plans.encode(whole(probe=None)), "probe: belongs to a plan whose action is probe"),
        (plans.encode(whole(action="rollback")), "probe: belongs to a plan whose action is probe"),
        (plans.encode(whole(target=None)), "target: a probe names the checkpoint"),
        (plans.encode(whole(skip_samples=[(5600, 5616)])), "a probe leaves no data out"),
    ],
)
def test_a_probe_that_cannot_be_meant_is_refused_with_its_field(data: bytes, says: str) -> None:
    with pytest.raises(PlanError, match=says):
        plans.decode_plan(data)
