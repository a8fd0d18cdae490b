"""The daemon's HTTP API: incidents, commands about them, health and metrics. It listens on loopback unless configured.

Answers under ``/api`` are ``{"status": "success", "data": …}`` or ``{"status": "error", "error": …}``. What it shows
was committed: after a crash the same is there.
"""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable
from typing import get_args

import uvicorn
from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import HTMLResponse, JSONResponse, PlainTextResponse, Response
from starlette.routing import Route

from trainwarden.rules.commands import MOST_BYTES, Commands, Name, Refused
from trainwarden.rules.metrics import Metrics
from trainwarden.rules.report.kept import recorded_of
from trainwarden.rules.report.markdown import to_markdown
from trainwarden.rules.report.page import incident_page
from trainwarden.rules.store import Store

_MOST = 10_000


def make_app(store: Store, metrics: Metrics, unready: Callable[[], str], commands: Commands) -> Starlette:
    """Return the application; ``unready()`` says why the daemon is not ready, or nothing."""

    def incidents(request: Request) -> Response:
        query = request.query_params
        unknown = set(query) - {"run", "state", "limit"}
        limit = query.get("limit", "1000")
        if unknown or not limit.isdigit() or not 1 <= int(limit) <= _MOST:
            return _error(400, f"parameters are run, state and limit (1 to {_MOST})")
        return _data(store.rows("incident", query.get("run"), query.get("state"), int(limit)))

    def incident(request: Request) -> Response:
        found = store.row("incident", request.path_params["identity"])
        if found is None:
            return _error(404, f"no incident {request.path_params['identity'][:64]}")
        return _data(found)

    async def command(request: Request) -> Response:
        body = await _body(request)
        path, given = request.path_params, request.headers.get("authorization", "")
        if path["command"] not in get_args(Name):
            return _error(404, f"commands are {', '.join(get_args(Name))}")
        try:
            await run_in_threadpool(commands.take, path["command"], path["identity"], given, body)
        except Refused as refused:
            return _error(refused.status, str(refused))
        return JSONResponse({"status": "success", "data": {"taken": path["command"]}}, status_code=202)

    def suspects(request: Request) -> Response:
        query = request.query_params
        if set(query) - {"run", "dataset", "all"} or query.get("all", "1") != "1":
            return _error(400, "parameters are run, dataset and all=1 (also what is no longer suspect)")
        found = store.rows("suspect", query.get("run"), None, _MOST) if "all" in query else commands.suspects()
        named = {name: query[name] for name in ("run", "dataset") if name in query}
        return _data([row for row in found if all(row.get(name) == value for name, value in named.items())])

    async def forget(request: Request) -> Response:
        try:
            body, given = await _body(request), request.headers.get("authorization", "")
            meant = await run_in_threadpool(commands.forget, given, body)
        except Refused as refused:
            return _error(refused.status, str(refused))
        return JSONResponse({"status": "success", "data": {"taken": "forget", "meant": meant}}, status_code=202)

    def report(request: Request) -> Response:
        identity = request.path_params["identity"]
        name = identity.removesuffix(".md")
        found = store.row("incident", name)
        if found is None:
            return PlainTextResponse(f"no incident {name[:64]}\n", status_code=404)
        if identity.endswith(".md"):
            return PlainTextResponse(to_markdown(found), media_type="text/markdown")
        told = incident_page(found, recorded_of(store.row("curves", name)), markdown=f"{name}.md")
        return HTMLResponse(told, headers={"X-Content-Type-Options": "nosniff", "Referrer-Policy": "no-referrer"})

    def notices(request: Request) -> Response:
        return _data(store.rows("notice", request.query_params.get("run")))

    def healthy(request: Request) -> Response:
        return PlainTextResponse("healthy\n")

    def ready(request: Request) -> Response:
        why = unready()
        return PlainTextResponse(f"{why or 'ready'}\n", status_code=503 if why else 200)

    def page(request: Request) -> Response:
        body, kind = metrics.page()
        return Response(body, media_type=kind)

    def landing(request: Request) -> Response:
        return PlainTextResponse(
            "trainwarden: /incidents/ID /api/v1/incidents /api/v1/notices /api/v1/suspects /metrics /-/healthy /-/ready\n"
        )

    return Starlette(
        routes=[
            Route("/", landing),
            Route("/api/v1/incidents", incidents),
            Route("/api/v1/incidents/{identity}", incident),
            Route("/api/v1/incidents/{identity}/{command}", command, methods=["POST"]),
            Route("/api/v1/notices", notices),
            Route("/incidents/{identity}", report),
            Route("/api/v1/suspects", suspects),
            Route("/api/v1/suspects/forget", forget, methods=["POST"]),
            Route("/-/healthy", healthy),
            Route("/-/ready", ready),
            Route("/metrics", page),
        ],
    )


async def _body(request: Request) -> bytes:
    """Return the body; of one that is too large, so much that it shows."""
    body = b""
    async for part in request.stream():
        body += part
        if len(body) > MOST_BYTES:
            break
    return body


def _data(data: object) -> Response:
    return JSONResponse({"status": "success", "data": data})


def _error(status: int, says: str) -> Response:
    return JSONResponse({"status": "error", "error": says}, status_code=status)


class Api:
    """The application on a thread of its own. The port is bound at once; 0 takes a free one.

    Raises:
        OSError: the address is taken.
    """

    def __init__(
        self,
        store: Store,
        metrics: Metrics,
        unready: Callable[[], str],
        commands: Commands,
        listen: tuple[str, int],
    ) -> None:
        family = socket.AF_INET6 if ":" in listen[0] else socket.AF_INET
        self._socket = socket.socket(family, socket.SOCK_STREAM)
        try:
            self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            self._socket.bind(listen)
            self._socket.listen(128)
        except OSError as error:
            self._socket.close()
            raise OSError(error.errno, f"cannot listen on {listen[0]}:{listen[1]}: {error.strerror}") from None
        config = uvicorn.Config(
            make_app(store, metrics, unready, commands),
            log_config=None,
            access_log=False,
            lifespan="off",
            timeout_graceful_shutdown=2,
            limit_concurrency=200,
            server_header=False,
        )
        self._server = uvicorn.Server(config)
        self._thread = threading.Thread(
            target=self._server.run, kwargs={"sockets": [self._socket]}, name="api", daemon=True
        )

    @property
    def address(self) -> str:
        """Where it listens: ``host:port``."""
        host, port = self._socket.getsockname()[:2]
        return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"

    def start(self) -> None:
        """Serve."""
        self._thread.start()

    def stop(self) -> None:
        """Answer what is being asked, then stop."""
        self._server.should_exit = True
        if self._thread.is_alive():
            self._thread.join(5.0)
        self._socket.close()
