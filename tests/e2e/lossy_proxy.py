"""A proxy in front of a run's exporter that loses some of its step records, for a daemon that must cope.

It follows the run across restarts by its target file. Which records are lost depends on their seq alone, so that a page
that is asked for again misses the same ones. The lines are dropped, the headers stay: a gap that the reader can see.
"""

from __future__ import annotations

import contextlib
import http.server
import json
import threading
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator

from trainwarden.runfolder import RunFolder

_KEPT = (
    "Content-Type",
    "Trainwarden-Start",
    "Trainwarden-Current-Start",
    "Trainwarden-First-Seq",
    "Trainwarden-Last-Seq",
)


@contextlib.contextmanager
def lossy_proxy(run: RunFolder, lost: Callable[[int], bool]) -> Iterator[str]:
    """Serve the exporter of ``run`` without the step records for whose seq ``lost`` is true; yield ``host:port``."""

    class Handler(http.server.BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            try:
                target = json.loads((run.path / "targets" / "rank-0.json").read_text())[0]["targets"][0]
                request = urllib.request.Request(f"http://{target}{self.path}")
                if self.headers["Authorization"]:
                    request.add_header("Authorization", self.headers["Authorization"])
                with urllib.request.urlopen(request, timeout=5) as answer:
                    status, headers, body = answer.status, answer.headers, answer.read()
            except urllib.error.HTTPError as error:
                status, headers, body = error.code, error.headers, error.read()
            except (OSError, ValueError):
                self.close_connection = True
                return
            if self.path.startswith("/api/v1/steps") and status == 200:
                body = b"".join(line for line in body.splitlines(keepends=True) if not _is_lost(line))
            self.send_response(status)
            for name in _KEPT:
                if headers[name]:
                    self.send_header(name, headers[name])
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, format: str, *args: object) -> None:
            pass

    def _is_lost(line: bytes) -> bool:
        record = json.loads(line)
        return bool(record.get("type") == "step" and lost(record["seq"]))

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield f"127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        server.server_close()
        thread.join(10)
