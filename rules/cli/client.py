"""The daemon's API, asked over HTTP. The only place of the command line that does."""

from __future__ import annotations

from typing import Any

import requests

_TIMEOUT = (3.0, 10.0)


class ApiError(RuntimeError):
    """The daemon did not answer, or said no. The message is for the user."""


def ask(url: str, path: str, params: dict[str, str] | None = None) -> Any:
    """Return the ``data`` of an answer of the daemon at ``url``.

    Raises:
        ApiError: it cannot be reached, or answers with an error.
    """
    return _exchange(url, "GET", path, params=params)


def tell(url: str, path: str, token: str, body: dict[str, Any]) -> Any:
    """Send a command to the daemon at ``url`` and return the ``data`` of its answer.

    Raises:
        ApiError: it cannot be reached, or refuses.
    """
    return _exchange(url, "POST", path, json=body, headers={"Authorization": f"Bearer {token}"})


def page(url: str, path: str) -> bytes:
    """Return a page of the daemon at ``url`` as it is.

    Raises:
        ApiError: it cannot be reached, or has no such page.
    """
    response = _answer(url, "GET", path)
    if response.status_code != 200:
        raise ApiError(f"{url}: {response.text.strip()[:200] or f'HTTP {response.status_code}'}")
    return response.content


def _exchange(url: str, method: str, path: str, **request: Any) -> Any:
    response = _answer(url, method, path, **request)
    try:
        body = response.json()
    except requests.JSONDecodeError:
        raise ApiError(f"{url}: answers, but not as a trainwarden daemon (is --url right?)") from None
    if not isinstance(body, dict) or body.get("status") != "success":
        says = body.get("error", "") if isinstance(body, dict) else ""
        raise ApiError(f"{url}: {says or f'HTTP {response.status_code}'}")
    return body["data"]


def _answer(url: str, method: str, path: str, **request: Any) -> requests.Response:
    """Return a daemon's answer, whatever it is, with its body read."""
    session = requests.Session()
    session.trust_env = False
    try:
        return session.request(method, f"{url.rstrip('/')}{path}", timeout=_TIMEOUT, allow_redirects=False, **request)
    except requests.RequestException as error:
        raise ApiError(
            f"{url}: no answer ({type(error).__name__}); is the daemon running, and is --url right?"
        ) from None
    finally:
        session.close()
