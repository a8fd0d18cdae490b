"""A plan that has steps looked at closely goes through a real receiver into the plan file; one that cannot be meant is refused."""

from __future__ import annotations

from tests.receiver.requested import Receiving
from tests.receiver.supervised import Supervised
from trainwarden.plan import CloseLook
from trainwarden.webhook import encode_envelope


def test_the_steps_arrive_in_the_plan_file_as_they_were_sent_and_garbled_ones_stop_nothing(
    running: Supervised, receiving: Receiving
) -> None:
    look = CloseLook(first_step=5, steps=13)
    envelope = receiving.envelope(running.run, anomaly=look, reasons={"anomaly": "Something was not finite."})
    body = encode_envelope(envelope)
    for wrong, says in (
        (b'"steps":0', "data.plan: anomaly.steps: 0 is not in 1 to 1000"),
        (b'"steps":"many"', "$.data.plan.anomaly.steps"),
    ):
        answer = receiving.send(body.replace(b'"steps":13', wrong), message_id="msg_garbled")
        assert answer.status_code == 400
        assert says in answer.json()["detail"]
    assert running.ask("look").live.attempt == 0
    assert receiving.send(envelope).status_code == 202
    running.wait_for("ready 1")
    receiving.wait_for(envelope, "executed")
    (plan,), refused = running.run.read_plans()
    assert (plan.anomaly, refused) == (look, [])
