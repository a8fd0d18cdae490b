"""A toy core and a toy exporter for tests of the daemon.

The toy core counts, and asks for one rollback an attempt when a loss exceeds 100. So these tests prove the driver whatever
the judgement does. The toy exporter serves lines over real HTTP as an exporter does.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from datetime import UTC, datetime
from http.server import BaseHTTPRequestHandler
from typing import Any
from urllib.parse import parse_qs, urlsplit

import msgspec

from tests.real import serve
from trainwarden.plan import Plan, Target
from trainwarden.record import Event, Step, encode_line
from trainwarden.rules.core.effects import Deliver, Effect, Query, Save
from trainwarden.rules.core.inputs import Command, Happened, Input, Observation, Receipt, SourceSeen, Start, Steps, Tick
from trainwarden.rules.daemon.live import Core
from trainwarden.webhook import Envelope, Request, request_id

TOKEN = "a-token-for-tests"
SECRET = "whsec_" + "QUJDREVGR0hJSktMTU5PUFFSU1RVVldYWVowMTIzNDU="


class Toy(msgspec.Struct):
    """State of the toy core."""

    steps: dict[str, int] = {}
    sum: float = 0.0
    events: list[str] = []
    asked: list[str] = []
    receipts: list[str] = []
    commands: list[str] = []
    observed: list[str] = []
    seen: list[tuple[str, bool, bool]] = []
    ticks: int = 0


def feed(state: Toy, value: Input) -> list[Effect]:
    """Take one input."""
    effects: list[Effect] = []
    if isinstance(value, Steps):
        for record in value.records:
            key = f"{value.start.start_id}/{value.rank}"
            state.steps[key] = state.steps.get(key, 0) + 1
            loss = record.value("loss") or 0.0
            state.sum += loss
            if loss == 666.0:
                raise RuntimeError("poison")
            if loss == 55.0:
                effects.append(Query(query_id=f"q{record.step}", kind="toy", arguments={}))
            if loss > 100.0:
                effects += ask(state, value.start, record)
    elif isinstance(value, Happened):
        state.events.append(f"{value.start.attempt}:{value.event.kind}:{value.event.seq}")
    elif isinstance(value, Receipt):
        state.receipts.append(f"{value.status}:{value.reason}")
    elif isinstance(value, Command):
        if value.name != "maintenance":  # a clock's word about windows, and nobody's about an incident
            state.commands.append(value.name)
    elif isinstance(value, Observation):
        state.observed.append(f"{value.query_id}:{value.error}")
    elif isinstance(value, SourceSeen):
        seen = (value.start.start_id, value.reachable, value.caught_up)
        if not state.seen or state.seen[-1] != seen:
            state.seen.append(seen)
    elif isinstance(value, Tick):
        state.ticks += 1
    plan = {"plan_id": "p0"} if state.asked else None
    row = {"id": "toy", "run": "toy", "state": "watching", "plan": plan, **msgspec.to_builtins(state)}
    effects.append(Save("incident", "toy", row))
    return effects


def ask(state: Toy, start: Start, record: Step) -> list[Effect]:
    """Ask for the one rollback of an attempt, and tell people."""
    key = request_id(start.run_uid, start.attempt, "rollback")
    if key in state.asked:
        return []
    state.asked.append(key)
    body = Envelope(
        type="training.rollback.requested",
        timestamp=datetime.fromtimestamp(record.time, UTC).isoformat(),
        data=Request(
            run_uid=start.run_uid,
            run=start.run,
            attempt=start.attempt,
            incident="toy",
            verdict="divergence",
            cause="data",
            confidence=1.0,
            plan=Plan(
                plan_id=f"p{start.attempt}",
                run_uid=start.run_uid,
                for_attempt=start.attempt + 1,
                target=Target(attempt=start.attempt, step=1, path="/nowhere"),
            ),
            expires_at=datetime.fromtimestamp(record.time + 3600, UTC).isoformat(),
        ),
    )
    common: dict[str, Any] = {
        "run": start.run,
        "run_uid": start.run_uid,
        "incident": "toy",
        "created": record.time,
        "expires_at": record.time + 3600,
    }
    return [
        Deliver(kind="webhook", key=key, body=msgspec.to_builtins(body), **common),
        Deliver(kind="notify", key=f"n-{key}", body={"summary": "toy incident", "severity": "critical"}, **common),
    ]


TOY_CORE = Core(
    feed,
    lambda settings, pack: Toy(),
    lambda state, runs: {"": msgspec.msgpack.encode(state)},
    lambda parts, settings, pack: msgspec.msgpack.decode(parts[""], type=Toy),
)


class ToyExporter:
    """Serves starts and their lines as an exporter does. ``fault(path)`` may answer a request in its place."""

    def __init__(self, run: str = "toy", run_uid: str = "uid-toy", rank: int = 0, port: int = 0) -> None:
        self.run, self.run_uid, self.rank = run, run_uid, rank
        self.starts: dict[str, list[bytes]] = {}
        self.known: set[str] = set()
        self.order: list[tuple[str, int]] = []
        self.requests: list[str] = []
        self.fault: Callable[[BaseHTTPRequestHandler, str], bool] | None = None
        self.first_held = 1
        self.authorized: Callable[[str | None], bool] = lambda header: header == f"Bearer {TOKEN}"
        self.closed = False
        outer = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_GET(self) -> None:
                outer.requests.append(self.path)
                if outer.closed:  # a kept-alive connection outlives the server's socket
                    self.close_connection = True
                    return
                if outer.fault is not None and outer.fault(self, self.path):
                    return
                outer.answer(self)

            def log_message(self, format: str, *args: Any) -> None:
                pass

        self.server = serve(Handler, port)

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.server.server_port}"

    def begin(self, start_id: str, attempt: int) -> None:
        self.starts[start_id] = []
        self.known.add(start_id)
        self.order.append((start_id, attempt))
        self.event("start", run_uid=self.run_uid, run=self.run, attempt=attempt, start_id=start_id, rank=self.rank)

    def event(self, kind: str, **fields: Any) -> None:
        lines = self.starts[self.order[-1][0]]
        lines.append(encode_line(Event(kind=kind, time=time.time(), seq=len(lines) + 1, fields=fields)))

    def step(self, loss: float) -> None:
        lines = self.starts[self.order[-1][0]]
        seq = len(lines) + 1
        lines.append(encode_line(Step(seq=seq, step=seq, time=time.time(), signals={"loss": loss})))

    def answer(self, handler: BaseHTTPRequestHandler) -> None:
        url = urlsplit(handler.path)
        query = {name: values[0] for name, values in parse_qs(url.query).items()}
        if not self.authorized(handler.headers.get("Authorization")):
            return reply(handler, 401)
        if not self.order:
            return reply(handler, 503)
        current = self.order[-1][0]
        if url.path == "/api/v1/run":
            return reply(handler, 200, self.starts[current][0] + b"\n")
        start_id = query["start_id"]
        if start_id not in self.known:
            return reply(handler, 410, b"", {"Trainwarden-Start": current})
        lines = self.starts[start_id]
        first = max(int(query["after"]), self.first_held - 1)
        wanted = lines[first : first + int(query["limit"])]
        headers = {
            "Trainwarden-Start": start_id,
            "Trainwarden-Current-Start": current,
            "Trainwarden-First-Seq": str(self.first_held),
            "Trainwarden-Last-Seq": str(len(lines)),
        }
        return reply(handler, 200, b"".join(line + b"\n" for line in wanted), headers)

    def close(self) -> None:
        self.closed = True
        self.server.shutdown()
        self.server.server_close()


def reply(
    handler: BaseHTTPRequestHandler, status: int, body: bytes = b"", headers: dict[str, str] | None = None
) -> None:
    """Answer a request whole."""
    handler.send_response(status)
    for name, value in {"Content-Length": str(len(body)), **(headers or {})}.items():
        handler.send_header(name, value)
    handler.end_headers()
    handler.wfile.write(body)


class ToyReceiver:
    """An idempotent receiver: one effect per webhook-id, the id remembered; verifies every signature."""

    def __init__(self) -> None:
        self.deliveries: list[str] = []
        self.effects: list[str] = []
        self.bodies: list[dict[str, Any]] = []
        self.status = "executed"
        self.fault: Callable[[BaseHTTPRequestHandler], bool] | None = None
        outer = self
        lock = threading.Lock()

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_POST(self) -> None:
                from trainwarden.webhook import verify

                body = self.rfile.read(int(self.headers["Content-Length"]))
                identity = verify([SECRET], dict(self.headers.items()), body, datetime.now(UTC))
                with lock:
                    outer.deliveries.append(identity)
                    if outer.fault is not None and outer.fault(self):
                        return None
                    outer.bodies.append(msgspec.json.decode(body))
                    if identity in outer.effects:
                        return reply(self, 200, msgspec.json.encode({"status": "duplicate", "id": identity}))
                    outer.effects.append(identity)
                return reply(self, 202, msgspec.json.encode({"status": "accepted", "id": identity}))

            def do_GET(self) -> None:
                identity = self.path.rpartition("/")[2]
                known = identity in outer.effects
                word = {"id": identity, "status": outer.status if known else "unknown", "plan_id": "p0"}
                return reply(self, 200 if known else 404, msgspec.json.encode(word))

            def log_message(self, format: str, *args: Any) -> None:
                pass

        self.server = serve(Handler)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server.server_port}/webhook"

    def close(self) -> None:
        self.server.shutdown()
        self.server.server_close()
