"""``trainwarden receiver``: the process that puts the receiver's parts together and serves them."""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import socket
import sys
from collections.abc import Iterator
from pathlib import Path

import structlog
import uvicorn

from . import locks
from .app import make_app
from .execution import Execution
from .intake import Intake
from .ledger import Ledger
from .metrics import Metrics
from .readiness import notify
from .schedulers.local import LocalScheduler
from .secretfile import read_secrets
from .settings import Settings, SettingsError

_log = structlog.get_logger("receiver")


class DatabaseBusyError(RuntimeError):
    """Another receiver has this database."""


def serve(settings: Settings) -> None:
    """Serve until SIGTERM or SIGINT; requests under way go on with the next receiver of the same database.

    Logs one line ``listening url=…`` to standard error once requests can come in.

    Raises:
        SettingsError: a setting is wrong.
        SecretFileError: the secret cannot be used.
        DatabaseBusyError: another receiver has this database.
        OSError: the address is in use, or a file cannot be opened.
    """
    _log_to_stderr()
    with _server(settings) as (server, listener, url):

        def end(*_: object) -> None:
            server.should_exit = True

        # uvicorn has handlers of its own while it serves and raises again what ended it: neither an early signal nor that
        # one may end the tidying.
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, end)
        _log.info("listening", url=url, roots=",".join(settings.roots))
        notify("READY=1")
        server.run(sockets=[listener])
        notify("STOPPING=1")


@contextlib.contextmanager
def _server(settings: Settings) -> Iterator[tuple[uvicorn.Server, socket.socket, str]]:
    host, port = settings.address()
    roots, checkpoints = settings.root_folders(), settings.checkpoint_folders()
    secrets = read_secrets(Path(settings.secret_file))
    path = Path(settings.db).absolute()
    if not path.parent.is_dir():
        raise SettingsError(("db",), f"{path.parent} is no folder; make it, or correct the name")
    with contextlib.ExitStack() as stack:
        lock = locks.take(path.with_name(path.name + ".lock"))
        if lock is None:
            raise DatabaseBusyError(f"{path}: another receiver has this database; stop it, or choose another --db")
        stack.callback(os.close, lock)
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        listener = stack.enter_context(socket.create_server((host, port), family=family, backlog=128))
        ledger = Ledger(path)
        stack.callback(ledger.close)
        metrics = Metrics()
        metrics.watch_pending(lambda: len(ledger.pending()))
        scheduler = LocalScheduler()
        execution = Execution(ledger, scheduler, metrics)
        intake = Intake(ledger, scheduler, secrets, roots, checkpoints, metrics, execution.wake)
        execution.start()
        stack.callback(execution.finish)
        config = uvicorn.Config(
            make_app(intake, ledger, metrics, execution.works),
            log_config=None,
            access_log=False,
            server_header=False,
            lifespan="off",
            timeout_graceful_shutdown=5,
            ssl_certfile=settings.tls_certificate,
            ssl_keyfile=settings.tls_key,
        )
        scheme = "https" if settings.tls_certificate else "http"
        shown = f"[{host}]" if ":" in host else host
        yield uvicorn.Server(config), listener, f"{scheme}://{shown}:{listener.getsockname()[1]}"


def _log_to_stderr() -> None:
    structlog.configure(
        processors=[
            structlog.processors.add_log_level,
            structlog.processors.TimeStamper(fmt="iso", utc=True, key="ts"),
            structlog.processors.LogfmtRenderer(key_order=["ts", "level", "event"], drop_missing=True),
        ],
        wrapper_class=structlog.make_filtering_bound_logger(logging.INFO),
        logger_factory=structlog.PrintLoggerFactory(sys.stderr),
    )
