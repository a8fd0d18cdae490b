"""The signed webhook to the receiver (Standard Webhooks 1.0.0), and its answer as the receiver's word.

Each attempt is signed anew, since a signature carries its own time; the webhook-id is the same for all. 2xx is success.
A redirect is not followed: a signed request to stop a run goes where the operator said, or nowhere.
"""

from __future__ import annotations

from collections.abc import Mapping
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from pathlib import Path
from typing import Any, cast
from urllib.parse import quote, urlsplit

import msgspec

from trainwarden.rules.config import ConfigError, read_webhook_secret
from trainwarden.rules.notifiers import Answer, Reason, ReceiptStatus
from trainwarden.rules.outbox import Row
from trainwarden.rules.sources.bounded import Reply, Unanswered, exchange, new_session
from trainwarden.webhook import WebhookError, sign

_LARGEST_ANSWER = 256 * 1024
_LONGEST_WAIT = 3600.0
_WORDS = ("accepted", "duplicate", "refused", "executed", "expired", "failed")


class WebhookNotifier:
    """Delivers to ``url`` with the secret in ``secret_file`` (read at each delivery: keys can be rotated)."""

    integration = "webhook"

    def __init__(
        self,
        url: str,
        secret_file: Path,
        status_url: str | None = None,
        timeout: float = 15.0,
        ca_file: Path | None = None,
    ) -> None:
        self.url = url
        parts = urlsplit(url)
        self.status_url = (status_url or f"{parts.scheme}://{parts.netloc}/api/v1/requests").rstrip("/")
        self._secret_file = secret_file
        self._timeout = timeout
        self._ca_file = None if ca_file is None else str(ca_file)

    def deliver(self, row: Row, now: float) -> Answer:
        """Sign and send the message."""
        try:
            secret = read_webhook_secret(self._secret_file)
            headers = sign(secret, row.key, datetime.fromtimestamp(now, UTC), row.body)
        except (ConfigError, WebhookError) as error:
            return Answer(reason="config", error=str(error), retryable=True)
        reply = self._ask("POST", self.url, headers, row.body)
        return reply if isinstance(reply, Answer) else judge(reply, now)

    def follow(self, row: Row, now: float) -> Answer:
        """Ask how the request ended; "accepted" means that it has not."""
        reply = self._ask("GET", f"{self.status_url}/{quote(row.key, safe='')}", {}, None)
        if isinstance(reply, Answer):
            return reply
        if reply.status != 200:
            return Answer(reason="answer", error=f"the receiver's status page answers {reply.status}", retryable=True)
        word = _word(reply)
        if word.get("status") not in _WORDS or word.get("id", row.key) != row.key:
            return Answer(
                reason="answer", error="the receiver's status page says nothing of this request", retryable=True
            )
        return _said(word)

    def reachable(self) -> str:
        """Ask the receiver whether it is healthy; return what is wrong, or nothing."""
        parts = urlsplit(self.url)
        reply = self._ask("GET", f"{parts.scheme}://{parts.netloc}/-/healthy", {}, None)
        if isinstance(reply, Answer):
            return f"{self.url}: {reply.error}"
        return "" if reply.status == 200 else f"{self.url}: its health page answers {reply.status}"

    def _ask(self, method: str, url: str, headers: Mapping[str, str], body: bytes | None) -> Reply | Answer:
        session = new_session(self._ca_file)
        try:
            return exchange(
                session, method, url, headers=headers, body=body, total_timeout=self._timeout, limit=_LARGEST_ANSWER
            )
        except Unanswered as error:
            reason: Reason = "timeout" if error.fault == "timeout" else "connect"
            return Answer(reason=reason, error=str(error), retryable=True)
        finally:
            session.close()


def judge(reply: Reply, now: float) -> Answer:
    """Say what a receiver's answer to a delivery means."""
    status = reply.status
    word = _word(reply)
    if 200 <= status < 300:
        if word.get("status") in _WORDS:
            return _said(word)
        return Answer(status="duplicate" if status == 200 else "accepted")
    if status == 409:
        return _said({**word, "status": "refused"})
    error = f"the receiver answers {status}"
    if word.get("detail") or word.get("reason"):
        error += f": {word.get('reason', '')} {word.get('detail', '')}".rstrip()
    if 300 <= status < 400:
        return Answer(reason="redirect", error=f"{error}, a redirect, which is not followed", status="undeliverable")
    if status == 410:
        return Answer(reason="gone", error=error, status="undeliverable", because="gone")
    wait = _retry_after(reply.headers.get("retry-after"), now)
    if status in (401, 403):
        return Answer(reason="auth", error=error, retryable=True, retry_after=wait)
    if status in (408, 425, 429):
        return Answer(reason="rate_limited", error=error, retryable=True, retry_after=wait)
    if status >= 500:
        return Answer(reason="server_error", error=error, retryable=True, retry_after=wait)
    return Answer(reason="client_error", error=error, status="undeliverable", detail=error)


def _said(word: Mapping[str, Any]) -> Answer:
    return Answer(
        status=cast(ReceiptStatus, word["status"]),
        because=str(word.get("reason") or "")[:200],
        detail=str(word.get("detail") or "")[:2000],
    )


def _word(reply: Reply) -> dict[str, Any]:
    try:
        found = msgspec.json.decode(reply.body)
    except (msgspec.DecodeError, UnicodeDecodeError):
        return {}
    return found if isinstance(found, dict) else {}


def _retry_after(text: str | None, now: float) -> float | None:
    """Read a Retry-After header: seconds or an HTTP date; at most an hour is honoured."""
    if not text:
        return None
    try:
        wait = float(text) if text.strip().isdigit() else parsedate_to_datetime(text).timestamp() - now
    except (ValueError, TypeError, OverflowError):
        return None
    return min(max(wait, 0.0), _LONGEST_WAIT)
