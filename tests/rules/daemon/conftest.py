"""Parts of a daemon's surroundings, each real: HTTP on loopback, files with modes, processes."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.rules.daemon.toy import SECRET, TOKEN, TOY_CORE, ToyExporter, ToyReceiver
from trainwarden.rules.config import Config, read_config
from trainwarden.rules.daemon.process import Daemon


@pytest.fixture
def exporter() -> Iterator[ToyExporter]:
    exporter = ToyExporter()
    yield exporter
    exporter.close()


@pytest.fixture
def receiver() -> Iterator[ToyReceiver]:
    receiver = ToyReceiver()
    yield receiver
    receiver.close()


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for name, text in (("token", TOKEN), ("secret", SECRET)):
        (tmp_path / name).write_text(text)
        (tmp_path / name).chmod(0o600)
    return tmp_path


@pytest.fixture
def make_config(folder: Path, exporter: ToyExporter, receiver: ToyReceiver) -> Callable[..., Config]:
    def make(more: str = "", sources: str = "") -> Config:
        sources = sources or f'[{{targets: ["{exporter.address}"], token_file: token}}]'
        text = f"""
listen: 127.0.0.1:0
sources: {sources}
poll_interval: 50ms
tick_interval: 200ms
snapshot_interval: 200ms
receiver: {{url: "{receiver.url}", secret_file: secret, timeout: 2s}}
limits: {{response_timeout: 1s, connect_timeout: 1s, page_lines: 50}}
{more}
"""
        (folder / "trainwarden.yml").write_text(text)
        return read_config(text, "trainwarden.yml", folder)

    return make


@pytest.fixture
def start_daemon(make_config: Callable[..., Config]) -> Iterator[Callable[..., Daemon]]:
    running: list[Daemon] = []

    def start(more: str = "", sources: str = "") -> Daemon:
        daemon = Daemon(make_config(more, sources), None, core=TOY_CORE)
        daemon.start()
        running.append(daemon)
        return daemon

    yield start
    for daemon in running:
        if not daemon.stopped:
            daemon.stop()
