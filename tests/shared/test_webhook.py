"""Webhooks: at one with the Standard Webhooks library both ways, and nothing malformed brings more than a WebhookError."""

from __future__ import annotations

import base64
import json
import string
from datetime import UTC, datetime, timedelta, timezone
from typing import Any

import msgspec
import pytest
import standardwebhooks
from hypothesis import given
from hypothesis import strategies as st

from trainwarden import webhook
from trainwarden.plan import Plan, Target
from trainwarden.webhook import Envelope, Evidence, Request, WebhookError, sign, verify

SECRET = "whsec_" + base64.b64encode(b"k" * 32).decode()
OTHER = "whsec_" + base64.b64encode(b"o" * 32).decode()
NOW = datetime(2026, 3, 29, 3, 0, 0, tzinfo=UTC)
BODY = '{"type": "x", "says": "Grüße"}'.encode()

REQUEST = Request(
    run_uid="u",
    run="gpt",
    attempt=0,
    incident="i1",
    verdict="divergence",
    cause="data",
    confidence=0.8,
    plan=Plan(plan_id="p1", run_uid="u", for_attempt=1, target=Target(attempt=0, step=4, path="c/4")),
    expires_at="2026-03-29T03:10:00Z",
    evidence=[Evidence(kind="order", says="the gradient led", step=5)],
)
ENVELOPE = Envelope(type="training.rollback.requested", timestamp="2026-03-29T03:00:00Z", data=REQUEST)


def test_the_library_accepts_what_we_sign() -> None:
    headers = sign(SECRET, "tw_1", datetime.now(UTC), BODY)  # the library reads the machine's own clock
    assert standardwebhooks.Webhook(SECRET).verify(BODY, headers) == {"type": "x", "says": "Grüße"}


def test_we_accept_what_the_library_signs() -> None:
    signature = standardwebhooks.Webhook(SECRET).sign("msg_1", NOW, BODY.decode())
    headers = {"Webhook-Id": "msg_1", "WEBHOOK-TIMESTAMP": str(int(NOW.timestamp())), "webhook-signature": signature}
    assert verify([SECRET], headers, BODY, NOW) == "msg_1"


def test_the_standard_s_own_vector_is_met() -> None:
    secret = "whsec_MfKQ9r8GKYqrTwjUPD8ILPZIo2LaLaSw"
    body = b'{"test": 2432232314}'
    headers = sign(secret, "msg_p5jXN8AQM9LWM0D4loKWxJek", datetime.fromtimestamp(1614265330, UTC), body)
    assert headers["webhook-signature"] == "v1,g0hM9SsE+OTPJTGt/tmIKtSyZlE3uFJELVlNIOLJ1OE="


@pytest.mark.parametrize("hours", [-11, -3.5, 0, 5.75, 14])
def test_a_time_in_any_zone_signs_the_same_instant(hours: float) -> None:
    there = NOW.astimezone(timezone(timedelta(hours=hours)))
    assert sign(SECRET, "tw_1", there, BODY) == sign(SECRET, "tw_1", NOW, BODY)


def test_a_naive_time_is_refused() -> None:
    with pytest.raises(WebhookError, match="aware"):
        sign(SECRET, "tw_1", NOW.replace(tzinfo=None), BODY)


@pytest.mark.parametrize("identifier", ["", "a.b", "a b", "a\r\nx: y", "ä", "x" * 257])
def test_an_id_that_would_not_verify_is_not_signed(identifier: str) -> None:
    with pytest.raises(WebhookError, match="id"):
        sign(SECRET, identifier, NOW, BODY)
    stamp = str(int(NOW.timestamp()))
    signature = standardwebhooks.Webhook(SECRET).sign(identifier, NOW, BODY.decode())
    headers = {"webhook-id": identifier, "webhook-timestamp": stamp, "webhook-signature": signature}
    with pytest.raises(WebhookError, match="webhook-id"):
        verify([SECRET], headers, BODY, NOW)


@pytest.mark.parametrize(
    ("seconds", "fresh"), [(0, True), (300, True), (-300, True), (301, False), (-301, False), (10**9, False)]
)
def test_a_message_is_fresh_for_five_minutes_either_way(seconds: int, fresh: bool) -> None:
    headers = sign(SECRET, "tw_1", NOW, BODY)
    later = NOW + timedelta(seconds=seconds)
    if fresh:
        assert verify([SECRET], headers, BODY, later) == "tw_1"
    else:
        with pytest.raises(WebhookError, match="old" if seconds > 0 else "ahead"):
            verify([SECRET], headers, BODY, later)


def test_while_keys_are_rotated_either_side_may_be_first() -> None:
    old, new = sign(OTHER, "tw_1", NOW, BODY), sign(SECRET, "tw_1", NOW, BODY)
    for secrets in ([SECRET, OTHER], [OTHER, SECRET]):
        assert verify(secrets, old, BODY, NOW) == verify(secrets, new, BODY, NOW) == "tw_1"
    both = {**new, "webhook-signature": f"v1a,xyz {old['webhook-signature']} {new['webhook-signature']}"}
    assert verify([SECRET], both, BODY, NOW) == "tw_1"
    with pytest.raises(WebhookError, match="signature"):
        verify([SECRET], old, BODY, NOW)


@pytest.mark.parametrize("part", ["id", "time", "body", "secret", "none at all"])
def test_a_change_of_anything_that_is_signed_breaks_the_signature(part: str) -> None:
    headers = sign(SECRET, "tw_1", NOW, BODY)
    body, secrets = BODY, [SECRET]
    if part == "id":
        headers["webhook-id"] = "tw_2"
    elif part == "time":
        headers["webhook-timestamp"] = str(int(NOW.timestamp()) + 1)
    elif part == "body":
        body = BODY.replace(b"x", b"y")
    else:
        secrets = [OTHER] if part == "secret" else []
    with pytest.raises(WebhookError, match="signature"):
        verify(secrets, headers, body, NOW)


@pytest.mark.parametrize("name", ["webhook-id", "webhook-timestamp", "webhook-signature"])
def test_a_missing_header_is_named(name: str) -> None:
    headers = sign(SECRET, "tw_1", NOW, BODY)
    del headers[name]
    with pytest.raises(WebhookError, match=name):
        verify([SECRET], headers, BODY, NOW)


# What HTTP servers hand on: latin-1 text, and anything that got past them.
HEADER = (
    st.text(max_size=60)
    | st.text(st.characters(max_codepoint=255), max_size=60)
    | st.sampled_from(["\ud800", "٣", "v1,", "-1", "1e9", "9" * 400])
)


@given(st.fixed_dictionaries({}, optional=dict.fromkeys(("webhook-id", "webhook-timestamp", "webhook-signature"), HEADER)), st.binary(max_size=50))  # fmt: skip
def test_any_headers_bring_a_webhook_error_and_nothing_else(changed: dict[str, str], body: bytes) -> None:
    good = sign(SECRET, "tw_1", NOW, BODY)
    for headers, sent in ((changed, body), ({**good, **changed}, body), ({**good, **changed}, BODY)):
        if headers == good and sent == BODY:
            continue
        with pytest.raises(WebhookError):
            verify([SECRET], headers, sent, NOW)


@pytest.mark.parametrize("secret", ["", "whsec_", "whsec_????", "whsec_" + "ä" * 32, "whsec_" + base64.b64encode(b"k" * 23).decode(), "whsec_" + base64.b64encode(b"k" * 65).decode()])  # fmt: skip
def test_a_weak_or_malformed_secret_is_refused(secret: str) -> None:
    with pytest.raises(WebhookError, match="secret"):
        sign(secret, "tw_1", NOW, BODY)


def test_an_envelope_comes_back_as_it_was() -> None:
    decoded = webhook.decode_envelope(webhook.encode_envelope(ENVELOPE))
    assert decoded == ENVELOPE
    assert decoded.action == "rollback"


def body_with(**data: Any) -> bytes:
    raw = msgspec.to_builtins(ENVELOPE)
    kind = data.pop("type", raw["type"])
    plan = {**raw["data"]["plan"], **data.pop("plan", {})}
    return msgspec.json.encode({**raw, "type": kind, "data": {**raw["data"], **data, "plan": plan}})


@pytest.mark.parametrize(
    ("body", "says"),
    [
        (b"", "body"),
        (b"\xff", "body"),
        (body_with()[:-3], "body"),
        (body_with(attempt="0"), "attempt"),
        (body_with(type="training.party.requested"), "type"),
        (body_with(type="training.stop.requested"), "a plan for rollback"),
        (body_with(plan={"plan_id": "../x"}), "plan_id"),
        (body_with(plan={"lr_factor": 3}), "lr_factor"),
        (body_with(plan={"skip_samples": [[5, 1]]}), "skip_samples"),
        (b'{"data": {"plan": {"probe": ' + b'{"a":' * 100_000, "body"),
    ],
)
def test_a_body_that_the_resume_side_could_not_use_is_refused_at_the_door(body: bytes, says: str) -> None:
    with pytest.raises(WebhookError, match=says):
        webhook.decode_envelope(body)


@given(st.binary(max_size=80) | st.integers(0, 400).map(lambda cut: body_with()[:cut]))
def test_any_body_brings_an_envelope_or_a_webhook_error(body: bytes) -> None:
    try:
        webhook.decode_envelope(body)
    except WebhookError:
        pass


def test_a_pin_takes_no_action_of_the_plan() -> None:
    assert webhook.decode_envelope(body_with(type="training.checkpoint.pin.requested")).action == "pin"


def test_the_id_of_a_request_is_a_function_of_what_is_asked() -> None:
    # Written out: two daemons of different versions must still send one id.
    assert webhook.request_id("u", 0, "rollback") == "tw_1080019f22a70fa958bccef166e981c3ce1ff226"
    every = {
        webhook.request_id(run_uid, attempt, action, n)
        for run_uid in ("u", "v")
        for attempt in (0, 1)
        for action, n in (("rollback", 0), ("stop", 0), ("lower_lr", 0), ("lower_lr", 1), ("probe", 0), ("pin", 0))
    }
    assert len(every) == 24
    assert all(set(identifier) <= set(string.ascii_lowercase + string.digits + "_") for identifier in every)


@pytest.mark.parametrize("action", ["rollback", "stop", "probe"])
def test_an_ending_action_can_be_asked_for_once_an_attempt(action: str) -> None:
    with pytest.raises(ValueError, match="n must be 0"):
        webhook.request_id("u", 0, action, 1)


def test_a_request_expires_after_its_last_second() -> None:
    assert not webhook.expired(REQUEST, datetime(2026, 3, 29, 3, 10, tzinfo=UTC))
    assert webhook.expired(REQUEST, datetime(2026, 3, 29, 3, 10, 1, tzinfo=UTC))


@pytest.mark.parametrize("text", ["soon", "", "2026-03-29T03:10:00"])
def test_an_expiry_that_is_no_aware_time_is_refused(text: str) -> None:
    with pytest.raises(WebhookError, match="expires_at"):
        webhook.expired(msgspec.structs.replace(REQUEST, expires_at=text), NOW)


@pytest.mark.parametrize("attempt", [-1, 2**53, 10**30])
def test_an_attempt_that_cannot_be_is_no_valid_body(attempt: int) -> None:
    raw = msgspec.json.decode(webhook.encode_envelope(ENVELOPE))
    raw["data"]["attempt"] = attempt
    with pytest.raises(WebhookError, match="is no attempt"):
        webhook.decode_envelope(json.dumps(raw).encode())
