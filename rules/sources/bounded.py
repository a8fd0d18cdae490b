"""HTTP requests that cannot cost more than their budget, whatever the peer does.

The timeouts of requests bound single waits: a peer that sends one byte a second is within them for ever, in the
headers as in the body. Here a deadline bounds the whole exchange, by way of the socket that everything is read from,
and a byte limit bounds the body. Redirects are not followed, proxies and netrc of the environment are not used,
compressed bodies are not accepted.
"""

from __future__ import annotations

import re
import socket
import ssl
import threading
import time
from collections.abc import Mapping
from typing import Any, Literal, TypeAlias
from urllib.parse import urlencode

import msgspec
import requests
from requests.adapters import HTTPAdapter
from requests.structures import CaseInsensitiveDict
from urllib3.connection import HTTPConnection, HTTPSConnection
from urllib3.connectionpool import HTTPConnectionPool, HTTPSConnectionPool
from urllib3.util.ssl_ import create_urllib3_context

#: Why no usable answer came; a closed set that becomes a metric label.
Fault: TypeAlias = Literal["refused", "name", "timeout", "reset", "too_large", "encoding", "tls", "other"]

_budget = threading.local()
# An address whose form nobody need look into: a path without anything to escape.
_PLAIN_URL = re.compile(r"http://[A-Za-z0-9.-]+:[0-9]{1,5}/[A-Za-z0-9._/-]*")


class Unanswered(Exception):
    """No usable answer came. ``fault`` says why in one word, the message in a sentence."""

    def __init__(self, fault: Fault, says: str) -> None:
        super().__init__(says)
        self.fault: Fault = fault


class Reply(msgspec.Struct, frozen=True):
    """A whole answer. Header names are lower case."""

    status: int
    headers: dict[str, str]
    body: bytes


def _wait_at_most(sock: socket.socket) -> None:
    end = getattr(_budget, "end", None)
    if end is None:
        return
    left = end - time.monotonic()
    if left <= 0:
        raise TimeoutError("the whole exchange took too long")
    wait = sock.gettimeout()
    if wait is None or wait > left:
        sock.settimeout(left)


class _Socket(socket.socket):
    def recv_into(self, *arguments: Any, **named: Any) -> int:
        _wait_at_most(self)
        return super().recv_into(*arguments, **named)


class _TlsSocket(ssl.SSLSocket):
    def recv_into(self, *arguments: Any, **named: Any) -> int:
        _wait_at_most(self)
        return super().recv_into(*arguments, **named)


class _Connection(HTTPConnection):
    def _new_conn(self) -> socket.socket:
        plain = super()._new_conn()
        wait = plain.gettimeout()
        bounded = _Socket(plain.family, plain.type, plain.proto, fileno=plain.detach())
        bounded.settimeout(wait)
        return bounded


class _Pool(HTTPConnectionPool):
    ConnectionCls = _Connection


class _TlsPool(HTTPSConnectionPool):
    ConnectionCls = HTTPSConnection


class _Adapter(HTTPAdapter):
    def init_poolmanager(self, *arguments: Any, **named: Any) -> None:
        context = create_urllib3_context()
        context.sslsocket_class = _TlsSocket
        super().init_poolmanager(*arguments, ssl_context=context, **named)
        self.poolmanager.pool_classes_by_scheme = {"http": _Pool, "https": _TlsPool}


class _Session(requests.Session):
    def get_redirect_target(self, resp: requests.Response) -> None:
        """Answer that no response redirects: even unfollowed ones would have their body read without a limit."""


def new_session(ca_file: str | None = None) -> requests.Session:
    """Return a session for :func:`exchange`: kept-alive connections, no retries of its own, nothing of the environment.

    ``ca_file`` holds the certificates to trust in place of the public ones.
    """
    session = _Session()
    if ca_file is not None:
        session.verify = ca_file
    session.trust_env = False
    for scheme in ("http://", "https://"):
        session.mount(scheme, _Adapter(pool_connections=1, pool_maxsize=1, max_retries=0))
    session.headers.update({"Accept-Encoding": "identity", "User-Agent": "trainwarden"})
    return session


def exchange(
    session: requests.Session,
    method: str,
    url: str,
    *,
    headers: Mapping[str, str] | None = None,
    params: Mapping[str, str] | None = None,
    body: bytes | None = None,
    connect_timeout: float = 3.0,
    total_timeout: float = 10.0,
    limit: int = 32 * 1024 * 1024,
) -> Reply:
    """Make one request and read the whole answer, within ``total_timeout`` seconds and ``limit`` bytes of body.

    Raises:
        Unanswered: there was no answer, or it broke off, was too slow or too large.
    """
    _budget.end = time.monotonic() + total_timeout
    try:
        with _send(
            session,
            _prepared(session, method, url, headers, params, body),
            (min(connect_timeout, total_timeout), total_timeout),
        ) as response:
            encoding = response.headers.get("content-encoding", "identity")
            if encoding != "identity":
                raise Unanswered("encoding", f"the answer is {encoding[:20]}-encoded, which was not asked for")
            received = bytearray()
            while True:
                piece = response.raw.read1(65536)
                if not piece:
                    break
                received += piece
                if len(received) > limit:
                    raise Unanswered("too_large", f"the answer has more than {limit} bytes")
                if time.monotonic() > _budget.end:
                    raise Unanswered("timeout", f"no whole answer within {total_timeout:g} s")
            announced = response.headers.get("content-length", "")
            if announced.isdigit() and method != "HEAD" and len(received) < int(announced):
                raise Unanswered("reset", f"the answer broke off after {len(received)} of {announced} bytes")
            return Reply(
                response.status_code,
                {name.lower(): value for name, value in response.headers.items()},
                bytes(received),
            )
    except Unanswered:
        session.close()  # a connection with half an answer in it must not be used again
        raise
    except Exception as error:
        session.close()
        raise _unanswered(error, total_timeout) from None
    finally:
        _budget.end = None


def _prepared(
    session: requests.Session,
    method: str,
    url: str,
    headers: Mapping[str, str] | None,
    params: Mapping[str, str] | None,
    body: bytes | None,
) -> requests.PreparedRequest:
    """Return the request as the session would prepare it; where there is nothing to merge, at a third of the cost."""
    if body is not None or len(session.cookies) or session.auth is not None or not _PLAIN_URL.fullmatch(url):
        return session.prepare_request(requests.Request(method, url, headers=headers, params=params, data=body))
    prepared = requests.PreparedRequest()
    prepared.method = method
    prepared.url = f"{url}?{urlencode(params)}" if params else url
    own: Any = {**session.headers, **(headers or {})}
    prepared.headers = CaseInsensitiveDict(own)
    prepared.hooks = {}
    return prepared


def _send(
    session: requests.Session, prepared: requests.PreparedRequest, timeout: tuple[float, float]
) -> requests.Response:
    """Send by the session's adapter: no redirects, no proxies, no cookies of the answer."""
    adapter = session.get_adapter(url=prepared.url or "")
    return adapter.send(
        prepared,
        stream=True,
        timeout=timeout,
        verify=True if session.verify is None else session.verify,
        cert=session.cert,
        proxies={},
    )


def _unanswered(error: Exception, total_timeout: float) -> Unanswered:
    chain: list[BaseException] = [error]
    while len(chain) < 8:
        current = chain[-1]
        inner = current.__cause__ or current.__context__ or getattr(current, "reason", None)
        if inner is None and current.args and isinstance(current.args[-1], BaseException):
            inner = current.args[-1]
        if not isinstance(inner, BaseException) or inner in chain:
            break
        chain.append(inner)
    for item in reversed(chain):
        if isinstance(item, ssl.SSLError):
            return Unanswered("tls", f"TLS: {item}")
        if isinstance(item, socket.gaierror):
            return Unanswered("name", "the host's name cannot be resolved")
        if isinstance(item, ConnectionRefusedError):
            return Unanswered("refused", "connection refused: nothing listens there")
        if isinstance(item, TimeoutError | requests.Timeout):
            return Unanswered("timeout", f"no whole answer within {total_timeout:g} s")
        if isinstance(item, ConnectionResetError | BrokenPipeError):
            return Unanswered("reset", "the connection was reset")
        if type(item).__name__ in (
            "RemoteDisconnected",
            "IncompleteRead",
            "ProtocolError",
            "BadStatusLine",
            "LineTooLong",
        ):
            return Unanswered("reset", f"the answer is no whole HTTP answer ({type(item).__name__})")
    return Unanswered("other", f"{type(error).__name__}: {str(error)[:200]}")
