"""``trainwarden run``: the daemon."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from trainwarden.rules.cli.output import fail

app = typer.Typer()


@app.command()
def run(
    config: Annotated[Path, typer.Option(envvar="TRAINWARDEN_CONFIG", help="Configuration file.")] = Path(
        "trainwarden.yml"
    ),
    listen: Annotated[str | None, typer.Option(envvar="TRAINWARDEN_LISTEN", help="host:port of the API.")] = None,
    state: Annotated[str | None, typer.Option(envvar="TRAINWARDEN_STATE", help="Database file.")] = None,
    poll_interval: Annotated[
        str | None, typer.Option(envvar="TRAINWARDEN_POLL_INTERVAL", help="Time between two polls, e.g. 2s.")
    ] = None,
    mode: Annotated[
        str | None, typer.Option(envvar="TRAINWARDEN_MODE", help="Policy mode: observe, approve or act.")
    ] = None,
    log_level: Annotated[
        str | None, typer.Option(envvar="TRAINWARDEN_LOG_LEVEL", help="debug, info, warning or error.")
    ] = None,
    log_format: Annotated[str | None, typer.Option(envvar="TRAINWARDEN_LOG_FORMAT", help="logfmt or json.")] = None,
) -> None:
    """Run the daemon: pull exporters, judge, notify and, where allowed, act.

    Flags win over the environment, the environment over the file. SIGTERM ends it with a last snapshot.
    """
    import signal
    import threading

    from trainwarden.rules.config import ConfigError, load_config
    from trainwarden.rules.daemon.process import Daemon
    from trainwarden.rules.daemon.systemd import notify
    from trainwarden.rules.logs import set_up
    from trainwarden.rules.rulefiles import RuleFileError, read_packs
    from trainwarden.rules.store import StoreError

    stop = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: stop.set())
    try:
        settings = load_config(
            config,
            {
                # A path that was typed is relative to where it was typed, one in the file to the file.
                "state": None if state is None else str(Path(state).absolute()),
                "listen": listen,
                "poll_interval": poll_interval,
                "mode": mode,
                "log_level": log_level,
                "log_format": log_format,
            },
        )
        pack = read_packs(settings.rules, settings.path("."))
        set_up(settings.log.level, settings.log.format)
        daemon = Daemon(settings, pack)
        daemon.start()
    except (ConfigError, RuleFileError, StoreError, OSError) as error:
        fail(str(error))
    notify("READY=1")
    while not stop.wait(0.2):
        if daemon.broken.is_set():
            break
    notify("STOPPING=1")
    daemon.stop()
    if daemon.broken.is_set():
        fail("the core thread ended; the log says why. A restart goes on from the last transaction")
