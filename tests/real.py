"""Real parts for tests: programs that must be there, free ports, waiting for what another process does.

A test that needs an absent program is skipped with a sentence that says how to get it. Under ``CI=true`` it fails instead: a
test that is silently not run proves nothing.
"""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, TypeVar

import pytest

T = TypeVar("T")

#: The command line, run by this interpreter.
TRAINWARDEN = [sys.executable, "-m", "trainwarden.rules"]

#: The Debian package that brings a program, where its name differs.
PACKAGE_OF = {"promtool": "prometheus", "amtool": "prometheus-alertmanager"}


def need_program(name: str) -> str:
    """Return the path of a program; skip the test where it is absent, or fail it under ``CI=true``."""
    path = shutil.which(name)
    if path is not None:
        return path
    says = f"{name} is not installed: apt-get install --no-install-recommends {PACKAGE_OF.get(name, name)}"
    if os.environ.get("CI") == "true":
        pytest.fail(f"{says} (list it in .ci/packages)", pytrace=False)
    pytest.skip(says)


def free_port() -> int:
    """Return a TCP port of 127.0.0.1 that was free a moment ago.

    Only for programs that cannot bind port 0 and say which one they got; our own can.
    """
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def wait_until(condition: Callable[[], T], seconds: float = 10.0, *, what: str = "", every: float = 0.02) -> T:
    """Call ``condition`` until it returns something true, and return that.

    Raises:
        AssertionError: it did not within ``seconds``; the message holds ``what`` and the last answer.
    """
    end = time.monotonic() + seconds
    while True:
        answer = condition()
        if answer:
            return answer
        if time.monotonic() >= end:
            raise AssertionError(f"not within {seconds:g} s: {what or condition!r} (last answer: {answer!r})")
        time.sleep(every)


def trainwarden(*arguments: str, cwd: Path | None = None, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run the command line as a process of its own, a minute long at most, at a terminal of 120 columns."""
    return subprocess.run(
        [*TRAINWARDEN, *arguments],
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
        cwd=cwd,
        env={**os.environ, "COLUMNS": "120", **environment},
    )


class _Quiet(ThreadingHTTPServer):
    daemon_threads = True

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A peer that goes away in the middle is what many tests are about."""


def serve(handler: type[BaseHTTPRequestHandler], port: int = 0) -> ThreadingHTTPServer:
    """Serve on 127.0.0.1 from a thread of its own; the caller shuts it down."""
    server = _Quiet(("127.0.0.1", port), handler)
    threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True).start()
    return server
