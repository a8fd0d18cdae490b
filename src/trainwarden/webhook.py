"""Webhooks between the daemon and the receiver: envelope, ids, signing and verification.

Standard Webhooks 1.0.0: three headers, a JSON body ``{"type", "timestamp", "data"}``, an HMAC-SHA256 signature over
``id.timestamp.body``. Delivery is at least once; the id is a function of what is asked, so that two daemons that saw
different symptoms of one broken attempt still send one id.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import hmac
import re
from collections.abc import Mapping
from datetime import UTC, datetime

import msgspec

from .plan import ENDING_ACTIONS, Action, Plan, PlanError, check_plan

#: How far a webhook-timestamp may lie from the receiver's clock, in seconds (Standard Webhooks 1.0.0).
TOLERANCE_SECONDS = 300

#: Visible ASCII; a dot would shift the borders of what is signed.
_MESSAGE_ID = re.compile(r"[!-\-/-~]{1,256}")

TYPE_OF: dict[str, str] = {
    "rollback": "training.rollback.requested",
    "stop": "training.stop.requested",
    "lower_lr": "training.learning_rate.lower.requested",
    "probe": "training.probe.requested",
    "pin": "training.checkpoint.pin.requested",
    "quarantine": "training.checkpoint.quarantine.requested",
}
ACTION_OF: dict[str, str] = {name: action for action, name in TYPE_OF.items()}


class WebhookError(ValueError):
    """A webhook that must not be acted upon: the signature, a header, the time or the body is wrong."""


class Evidence(msgspec.Struct, frozen=True, kw_only=True):
    """One observation that led to the request."""

    kind: str
    says: str
    step: int | None = None


class Alert(msgspec.Struct, frozen=True, kw_only=True):
    """One alert of the incident: since which step it holds, when it fired, what its rule compared, and its texts, filled in.

    ``value`` is a number, the word for one that is not finite, or None where nothing was compared. ``annotations`` are texts
    of an operator: whoever shows them escapes them.
    """

    alert: str
    since: int
    step: int
    value: float | str | None = None
    annotations: dict[str, str] = msgspec.field(default_factory=dict)


class Request(msgspec.Struct, frozen=True, kw_only=True):
    """``data`` of an envelope: what is asked of which attempt, why, and until when it is worth doing."""

    run_uid: str
    run: str
    attempt: int
    incident: str
    verdict: str
    cause: str
    confidence: float
    plan: Plan
    expires_at: str
    evidence: list[Evidence] = msgspec.field(default_factory=list)
    alerts: list[Alert] = msgspec.field(default_factory=list)
    report_url: str | None = None


class Envelope(msgspec.Struct, frozen=True, kw_only=True):
    """The body of a webhook. ``timestamp`` is when the event arose, ISO 8601 in UTC."""

    type: str
    timestamp: str
    data: Request

    @property
    def action(self) -> str:
        """The action that the type names."""
        return ACTION_OF[self.type]


def request_id(run_uid: str, attempt: int, action: Action | str, n: int = 0) -> str:
    """Return the webhook-id of the ``n``-th request of ``action`` in this attempt.

    Raises:
        ValueError: ``n`` is not 0 for an action that ends the attempt.
    """
    if action in ENDING_ACTIONS and n != 0:
        raise ValueError(f"{action} ends an attempt and can be asked for once: n must be 0, not {n}")
    digest = hashlib.sha256(f"{run_uid}\n{attempt}\n{action}\n{n}".encode()).hexdigest()
    return f"tw_{digest[:40]}"


def encode_envelope(envelope: Envelope) -> bytes:
    """Encode the body that is signed and sent."""
    return msgspec.json.encode(envelope)


#: Attempts count from 0 and are kept in a database of 64-bit numbers.
_LARGEST_ATTEMPT = 2**53


def decode_envelope(body: bytes) -> Envelope:
    """Decode a verified body.

    Raises:
        WebhookError: a field is missing, has the wrong type, the type is not known or asks for another action than the
            plan, or the plan is one that the resume side would refuse.
    """
    try:
        envelope = msgspec.json.decode(body, type=Envelope)
        check_plan(envelope.data.plan, "data.plan")
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError, PlanError) as error:
        raise WebhookError(f"body: {error}") from None
    if not 0 <= envelope.data.attempt < _LARGEST_ATTEMPT:
        raise WebhookError(f"body: data.attempt: {envelope.data.attempt} is no attempt")
    if envelope.type not in ACTION_OF:
        raise WebhookError(f"body: type {envelope.type!r} is not one of {', '.join(sorted(ACTION_OF))}")
    if envelope.action not in ("pin", envelope.data.plan.action):
        raise WebhookError(f"body: type {envelope.type} with a plan for {envelope.data.plan.action}")
    return envelope


def decode_secret(secret: str) -> bytes:
    """Return the key of a ``whsec_…`` secret.

    Raises:
        WebhookError: it is not base64, or the key has fewer than 24 or more than 64 bytes.
    """
    try:
        key = base64.b64decode(secret.removeprefix("whsec_"), validate=True)
    except (binascii.Error, ValueError):
        raise WebhookError("secret: not base64; make one with `trainwarden receiver new-secret`") from None
    if not 24 <= len(key) <= 64:
        raise WebhookError(f"secret: {len(key)} bytes; Standard Webhooks wants 24 to 64")
    return key


def sign(secret: str, message_id: str, at: datetime, body: bytes) -> dict[str, str]:
    """Return the three headers of a delivery made at ``at`` (aware). Each attempt at delivery signs anew.

    Raises:
        WebhookError: the secret or the id is malformed, or ``at`` is naive.
    """
    from standardwebhooks import Webhook

    decode_secret(secret)
    if not _MESSAGE_ID.fullmatch(message_id):
        raise WebhookError(f"id {message_id!r}: must be 1 to 256 visible ASCII characters without a dot")
    if at.tzinfo is None:
        raise WebhookError("time of a delivery must be aware")
    utc = at.astimezone(UTC)  # the library relabels a non-UTC time instead of converting it
    signature = Webhook(secret).sign(msg_id=message_id, timestamp=utc, data=body.decode())
    return {
        "webhook-id": message_id,
        "webhook-timestamp": str(int(utc.timestamp())),
        "webhook-signature": signature,
        "content-type": "application/json",
    }


def verify(secrets: list[str], headers: Mapping[str, str], body: bytes, now: datetime) -> str:
    """Check signature and age, and return the webhook-id. Several secrets are accepted while keys are rotated.

    The comparison takes constant time. ``now`` is the receiver's clock (aware).

    Raises:
        WebhookError: a header is missing or malformed, the time is more than 300 s away, or no signature matches.
    """
    from standardwebhooks import Webhook

    lowered = {name.lower(): value for name, value in headers.items()}
    try:
        message_id = lowered["webhook-id"]
        stamp = lowered["webhook-timestamp"]
        signatures = lowered["webhook-signature"]
    except KeyError as error:
        raise WebhookError(f"header {error.args[0]} is missing") from None
    if not _MESSAGE_ID.fullmatch(message_id):
        raise WebhookError("header webhook-id: malformed")
    if not (stamp.isascii() and stamp.isdigit() and len(stamp) <= 12):
        raise WebhookError("header webhook-timestamp: not a whole number of seconds")
    age = now.timestamp() - int(stamp)
    if abs(age) > TOLERANCE_SECONDS:
        raise WebhookError(
            f"header webhook-timestamp: {abs(age):.0f} s {'old' if age > 0 else 'ahead'}, more than {TOLERANCE_SECONDS}"
        )
    try:
        text = body.decode()
    except UnicodeDecodeError:
        raise WebhookError("body: not UTF-8") from None
    # The library's own verify() reads the machine's clock and lets ValueErrors through: sign again and compare.
    at = datetime.fromtimestamp(int(stamp), UTC)
    given = [signature.encode(errors="replace") for signature in signatures.split(" ")]
    matched = False
    for secret in secrets:
        decode_secret(secret)
        expected = Webhook(secret).sign(msg_id=message_id, timestamp=at, data=text).encode()
        for signature in given:
            matched |= hmac.compare_digest(expected, signature)
    if not matched:
        raise WebhookError("header webhook-signature: no signature matches")
    return message_id


def expired(request: Request, now: datetime) -> bool:
    """Say whether the request is past its ``expires_at``.

    Raises:
        WebhookError: ``expires_at`` is not an aware ISO 8601 time.
    """
    try:
        end = datetime.fromisoformat(request.expires_at)
    except ValueError:
        raise WebhookError(f"body: data.expires_at: {request.expires_at!r} is not an ISO 8601 time") from None
    if end.tzinfo is None:
        raise WebhookError("body: data.expires_at: has no time zone")
    return now > end
