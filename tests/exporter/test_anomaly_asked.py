"""Who asks for a close look: a plan through the signed webhook and the plan file, a call, a setting, the environment; and what is refused."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.exporter.gpt import batch, loss_on
from tests.exporter.planted import LogOfNegative, forget_compiled, planted
from tests.exporter.runs import events, watch
from trainwarden.exporter.closely import named
from trainwarden.plan import Checks, CloseLook, Plan, PlanError, Target
from trainwarden.receiver import planfiles
from trainwarden.receiver.secretfile import read_secrets, write_new_secret
from trainwarden.runfolder import RunFolder
from trainwarden.webhook import TYPE_OF, Envelope, Request, WebhookError, decode_envelope, encode_envelope, sign, verify


@pytest.fixture(autouse=True)
def nothing_is_compiled() -> None:
    forget_compiled()


def trained(folder: Path, count: int, *, bad: int = 0, resume: bool = False, ask: Any = None, **settings: Any) -> Any:
    """Run one attempt: from a checkpoint where the folder says so. Returns the closed exporter."""
    model, fault = planted(LogOfNegative)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    exporter = watch(model, optimizer, folder, **settings)
    target = exporter.resume() if resume else None
    done = 0 if target is None else target.step
    if target is not None:
        model.load_state_dict(torch.load(target.path))
    if resume:
        exporter.resumed(done)
    state = {name: value.clone() for name, value in model.state_dict().items()}
    for step in range(done + 1, done + count + 1):
        if ask is not None:
            ask(exporter, step)
        optimizer.zero_grad()
        fault.on = step == bad
        loss = loss_on(model, batch(step))
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        model.load_state_dict(state)
        exporter.step(loss.detach())
        if step == 2 and not resume:
            torch.save(model.state_dict(), folder / "2.pt")
            exporter.checkpoint(2, folder / "2.pt")
    exporter.close()
    return exporter


def delivered(folder: Path, look: CloseLook | None) -> Plan:
    """Sign a request with the plan, verify and decode it as the receiver does, and write its plan file."""
    run = RunFolder("run", folder)
    identity = run.identity()
    assert identity is not None
    plan = Plan(
        plan_id="p1",
        run_uid=identity.run_uid,
        for_attempt=1,
        target=Target(attempt=0, step=2, path=str(folder / "2.pt")),
        checks=Checks(start_step=3),
        reasons={"anomaly": "Something was not finite."},
        anomaly=look,
    )
    now = datetime.now(UTC)
    request = Request(
        run_uid=identity.run_uid,
        run="run",
        attempt=0,
        incident="run-0-4",
        verdict="nonfinite",
        cause="numeric",
        confidence=0.6,
        plan=plan,
        expires_at=(now + timedelta(minutes=5)).isoformat(),
    )
    body = encode_envelope(Envelope(type=TYPE_OF["rollback"], timestamp=now.isoformat(), data=request))
    write_new_secret(folder / "secret")
    secrets = read_secrets(folder / "secret")
    headers = sign(secrets[0], "msg_1", now, body)
    assert verify(secrets, headers, body, now) == "msg_1"
    received = decode_envelope(body).data.plan
    planfiles.write(run, received)
    return received


def applied(folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = events(folder, "start")[-1].fields["plan_applied"]
    return found


def states(folder: Path) -> list[tuple[Any, Any, Any]]:
    told = [event.fields for event in events(folder, "anomaly")]
    return [(one["state"], one.get("asked_by"), one.get("first_step")) for one in told]


def test_a_plan_goes_through_webhook_and_file_and_its_steps_are_looked_at_and_reported(tmp_path: Path) -> None:
    trained(tmp_path, 4, bad=4)
    look = CloseLook(first_step=4, steps=3)
    assert delivered(tmp_path, look).anomaly == look
    exporter = trained(tmp_path, 6, bad=5, resume=True)
    assert exporter.notices == []
    assert applied(tmp_path)["anomaly"] == {"first_step": 4, "steps": 3, "check_nan": False}
    assert applied(tmp_path)["not_applied"] == {}
    assert states(tmp_path) == [("begun", "plan", 4), ("found", None, None), ("ended", None, 4)]
    (found,) = [event for event in events(tmp_path, "anomaly") if event.fields["state"] == "found"]
    assert (found.step, found.fields["module"], found.fields["op"]) == (5, "h.1.mlp.1", "log")


def test_of_a_look_that_begins_before_the_attempt_the_rest_is_taken_and_reported(tmp_path: Path) -> None:
    trained(tmp_path, 4)
    delivered(tmp_path, CloseLook(first_step=1, steps=4))
    trained(tmp_path, 4, resume=True)
    assert applied(tmp_path)["anomaly"] == {"first_step": 3, "steps": 2, "check_nan": False}
    ended = events(tmp_path, "anomaly")[-1].fields
    assert (ended["first_step"], ended["last_step"], ended["looked"]) == (3, 4, 2)


def test_a_look_whose_steps_are_over_is_reported_as_not_applied_with_the_reason(tmp_path: Path) -> None:
    trained(tmp_path, 4)
    delivered(tmp_path, CloseLook(first_step=1, steps=2))
    trained(tmp_path, 4, resume=True)
    says = "steps 1 to 2 lie before step 3, the first of this attempt"
    assert (applied(tmp_path)["anomaly"], applied(tmp_path)["not_applied"]) == (None, {"anomaly": says})
    assert states(tmp_path) == []


def test_a_look_that_cannot_begin_costs_nothing_else_of_the_plan(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from trainwarden.exporter.anomaly import asked

    def broken(*_: Any) -> None:
        raise RuntimeError("no room")

    trained(tmp_path, 4)
    delivered(tmp_path, CloseLook(first_step=4, steps=2))
    monkeypatch.setattr(asked, "Found", broken)
    trained(tmp_path, 4, resume=True)
    assert applied(tmp_path)["not_applied"] == {"anomaly": "RuntimeError: no room"}
    assert applied(tmp_path)["target"]["step"] == 2


def test_a_plan_without_the_field_has_nothing_looked_at(tmp_path: Path) -> None:
    trained(tmp_path, 4)
    delivered(tmp_path, None)
    trained(tmp_path, 4, resume=True)
    assert (applied(tmp_path)["anomaly"], applied(tmp_path)["not_applied"]) == (None, {})
    assert states(tmp_path) == []


def test_a_garbled_field_is_refused_by_the_receiver_and_by_the_exporter_with_field_and_reason(tmp_path: Path) -> None:
    trained(tmp_path, 4)
    with pytest.raises(WebhookError, match=r"anomaly\.steps: 5000 is not in 1 to 1000"):
        delivered(tmp_path, CloseLook(first_step=3, steps=5000))
    (tmp_path / "secret").unlink()
    delivered(tmp_path, CloseLook(first_step=3, steps=5))
    (path,) = (tmp_path / "run" / "plans").glob("*.json")
    path.write_text(path.read_text().replace('"steps": 5', '"steps": "many"'))
    trained(tmp_path, 2, resume=True)
    (notice,) = [one for one in events(tmp_path, "start")[-1].fields["notices"] if "plan refused" in one]
    assert str(path) in notice
    assert "$.anomaly.steps" in notice
    assert states(tmp_path) == []


def test_a_call_has_the_open_step_and_those_behind_it_looked_at_and_more_asked_meanwhile_joins(tmp_path: Path) -> None:
    def ask(exporter: Any, step: int) -> None:
        if step in (3, 4):
            exporter.look_closely(2)
        if step == 5:
            exporter.look_closely(2, first_step=8)

    trained(tmp_path, 10, ask=ask)
    assert states(tmp_path) == [("begun", "call", 3), ("ended", None, 3), ("begun", "call", 8), ("ended", None, 8)]
    assert [event.fields["looked"] for event in events(tmp_path, "anomaly") if "looked" in event.fields] == [3, 2]


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ({"steps": 0}, "steps: 0 is not in 1 to 1000"),
        ({"steps": 1001}, "steps: 1001 is not in 1 to 1000"),
        ({"steps": "many"}, "Expected `int`, got `str` - at `$.steps`"),
        ({"steps": 2, "first_step": 1}, "steps 1 to 2 are over: step 3 is next"),
    ],
)
def test_a_call_that_cannot_be_meant_is_said_and_the_training_goes_on(
    tmp_path: Path, arguments: dict[str, Any], says: str
) -> None:
    exporter = trained(
        tmp_path, 4, ask=lambda exporter, step: exporter.look_closely(**arguments) if step == 3 else None
    )
    (notice,) = exporter.notices
    assert notice == f"look_closely: {says}: not looked at"
    assert states(tmp_path) == []


def test_the_environment_asks_for_a_run_whose_script_is_not_to_be_changed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TRAINWARDEN_ANOMALY", "2:2")
    exporter = trained(tmp_path, 5)
    assert exporter.notices == []
    assert states(tmp_path) == [("begun", "setting", 2), ("ended", None, 2)]


@pytest.mark.parametrize("text", ["12", "a:b", "1:", "-1:5", "1:0", "0:5", "1:5000"])
def test_a_garbled_variable_is_said_with_its_name_and_nothing_is_looked_at(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str
) -> None:
    with pytest.raises(PlanError):
        named(text)
    monkeypatch.setenv("TRAINWARDEN_ANOMALY", text)
    exporter = trained(tmp_path, 2)
    (notice,) = exporter.notices
    assert notice.startswith("TRAINWARDEN_ANOMALY: ")
    assert states(tmp_path) == []


@pytest.mark.parametrize("given", [7, (1,), ("1", 2), (1, 2.5), (0, 5), (1, 0), (1, 1001)])
def test_a_setting_that_cannot_be_meant_is_refused_when_the_exporter_is_made(tmp_path: Path, given: Any) -> None:
    model, _ = planted(LogOfNegative)
    with pytest.raises((TypeError, ValueError), match="anomaly"):
        watch(model, torch.optim.SGD(model.parameters(), lr=0.1), tmp_path, anomaly=given)


def test_a_look_of_a_start_with_no_room_for_its_file_goes_on_with_its_events(tmp_path: Path) -> None:
    def ask(exporter: Any, step: int) -> None:
        if step == 2:
            (tmp_path / "run" / "attempt-0" / exporter.start_id / "rank-0" / "anomaly.jsonl").mkdir(parents=True)

    exporter = trained(tmp_path, 4, bad=3, ask=ask, anomaly=(2, 2))
    assert [notice for notice in exporter.notices if notice.startswith("writing ")]
    assert [state for state, _, _ in states(tmp_path)] == ["begun", "found", "ended"]
