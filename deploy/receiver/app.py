"""The receiver's HTTP: POST /webhook, GET /api/v1/requests/ID, /-/healthy, /-/ready, /metrics. It decides nothing itself."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from datetime import UTC, datetime
from typing import Any

from prometheus_client import CONTENT_TYPE_LATEST
from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, PlainTextResponse, Response
from starlette.routing import Route

from .intake import Intake
from .ledger import DatabaseError, Ledger
from .metrics import Metrics

#: Longest body in bytes: Standard Webhooks advises 20 kB; long lists of skips need more.
LONGEST_BODY = 262_144
#: How long a body may take to arrive, in seconds.
BODY_SECONDS = 15.0


class _TooLargeError(Exception):
    pass


def make_app(intake: Intake, ledger: Ledger, metrics: Metrics, works: Callable[[], bool]) -> Starlette:
    """Return the ASGI app. ``works`` says whether requests are being carried out; /-/ready is 503 where it does not."""

    async def webhook(request: Request) -> Response:
        try:
            body = await asyncio.wait_for(_read(request), BODY_SECONDS)
        except _TooLargeError:
            metrics.requests.labels("too_large").inc()
            return JSONResponse({"status": "too_large", "detail": f"at most {LONGEST_BODY} bytes"}, 413)
        except TimeoutError:
            return JSONResponse({"status": "invalid", "detail": "the body did not arrive"}, 408)
        except ClientDisconnect:
            return Response(status_code=400)
        reply = await run_in_threadpool(intake.take, request.headers, body)
        return JSONResponse(reply.body, reply.code)

    def status(request: Request) -> Response:
        found = look_up(ledger, request.path_params["id"])
        if found is None:
            return JSONResponse({"status": "unknown", "detail": "no request of this id"}, 404)
        return JSONResponse(found)

    def healthy(_: Request) -> Response:
        return PlainTextResponse("healthy\n")

    def ready(_: Request) -> Response:
        try:
            ledger.pending()
        except DatabaseError as error:
            return PlainTextResponse(f"the ledger cannot be read: {error}\n", 503)
        return PlainTextResponse("ready\n") if works() else PlainTextResponse("nothing is carried out\n", 503)

    def page(_: Request) -> Response:
        return Response(metrics.page(), media_type=CONTENT_TYPE_LATEST)

    return Starlette(
        routes=[
            Route("/webhook", webhook, methods=["POST"]),
            Route("/api/v1/requests/{id}", status),
            Route("/-/healthy", healthy),
            Route("/-/ready", ready),
            Route("/metrics", page),
        ]
    )


def look_up(ledger: Ledger, request_id: str) -> dict[str, Any] | None:
    """Return what became of a request, or None if it was never seen. An acceptance outweighs refusals of its id."""
    row = ledger.find(request_id)
    if row is not None:
        status, reason, detail, plan_id, updated = row.status, row.reason, row.detail, row.plan_id, row.updated
    else:
        refusal = ledger.refusal(request_id)
        if refusal is None:
            return None
        status = "expired" if refusal.reason == "expired" else "refused"
        reason, detail, plan_id, updated = refusal.reason, refusal.detail, refusal.plan_id, refusal.updated
    return {
        "id": request_id,
        "status": status,
        "reason": reason,
        "detail": detail,
        "plan_id": plan_id,
        "updated": datetime.fromtimestamp(updated, UTC).isoformat(),
    }


async def _read(request: Request) -> bytes:
    length = request.headers.get("content-length", "")
    if length.isascii() and length.isdigit() and int(length) > LONGEST_BODY:
        raise _TooLargeError
    body = bytearray()
    async for chunk in request.stream():
        body += chunk
        if len(body) > LONGEST_BODY:
            raise _TooLargeError
    return bytes(body)
