"""Puts the HTTP server on its port and tells where it is: the targets file of the run's folder.

A port in use costs the fixed port, not the run: a free one is taken, said once, and written down.
"""

from __future__ import annotations

import errno
import socket
from pathlib import Path

import msgspec

from trainwarden.runfolder import RunFolder, write_whole

from .http import Application, Server
from .identity import Identity
from .notices import Notices
from .settings import BASE_PORT, Settings

ANY_HOST = ("0.0.0.0", "::", "")


class Serving:
    """The server of one rank and its entry for ``file_sd_configs`` and the daemon's folder source."""

    def __init__(self, settings: Settings, identity: Identity, folder: RunFolder, application: Application) -> None:
        self._settings = settings
        self._identity = identity
        self._path = folder.path / "targets" / f"rank-{identity.rank}.json"
        self._application = application
        self._server: Server | None = None

    @property
    def port(self) -> int | None:
        """The port that is bound, or None."""
        return None if self._server is None else self._server.port

    def start(self, notices: Notices) -> None:
        """Bind, serve, and write the targets file. Faults are said, none is raised."""
        wanted = self._settings.port if self._settings.port is not None else BASE_PORT + self._identity.local_rank
        try:
            try:
                self._server = Server(self._settings.host, wanted, self._application)
            except OSError as error:
                if error.errno not in (errno.EADDRINUSE, errno.EACCES) or wanted == 0:
                    raise
                self._server = Server(self._settings.host, 0, self._application)
                notices.say("port", f"port {wanted} cannot be had ({error.strerror}): serving on {self._server.port}")
        except OSError as error:
            notices.fault(f"HTTP on {self._settings.host}:{wanted}", error)
            return
        try:
            self._write(self._path)
        except OSError as error:
            notices.fault(f"targets file {self._path}", error)

    def _write(self, path: Path) -> None:
        host = socket.gethostname() if self._settings.host in ANY_HOST else self._settings.host
        address = f"[{host}]:{self.port}" if ":" in host else f"{host}:{self.port}"
        labels = {"run": self._identity.run, "rank": str(self._identity.rank)}
        write_whole(path, msgspec.json.encode([{"targets": [address], "labels": labels}]))
        path.chmod(0o644)  # it holds no secret, and Prometheus runs as another user

    def stop(self, seconds: float) -> None:
        """Wait at most ``seconds`` for readers, close the server and take the targets file away."""
        if self._server is None:
            return
        self._application.wait_for_readers(seconds)
        self._server.stop()
        self._server = None
        try:
            self._path.unlink(missing_ok=True)
        except OSError:
            return
