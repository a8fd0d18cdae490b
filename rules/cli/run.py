"""``trainwarden run``: the daemon."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from trainwarden.rules.cli.output import fail

app = typer.Typer()

#: The configuration of ``--follow`` without a file: also the exporters whose runs lie here, as observer.
_WITHOUT_FILE = 'sources: [{folder: ".trainwarden/*/targets", act: false}]'


@app.command()
def run(
    files: Annotated[list[str] | None, typer.Argument(help="Further files to follow, after --follow FILE.")] = None,
    follow: Annotated[
        list[str] | None, typer.Option(help="Follow this log file (or glob) as it grows: observe and notify only.")
    ] = None,
    format: Annotated[str, typer.Option(help="Format of the followed files: auto, or as in replay.")] = "auto",
    map: Annotated[
        list[str] | None, typer.Option(help="SIGNAL=COLUMN of the followed files, such as loss=train/loss.")
    ] = None,
    config: Annotated[
        Path | None,
        typer.Option(envvar="TRAINWARDEN_CONFIG", help="Configuration file; trainwarden.yml by default."),
    ] = None,
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

    With --follow it needs no exporter and no configuration file. Flags win over the environment, the environment over the file. SIGTERM ends it with a last snapshot.
    """
    import signal
    import threading

    from trainwarden.rules.collector import settle
    from trainwarden.rules.config import ConfigError, load_config, read_config
    from trainwarden.rules.daemon.following import Follow
    from trainwarden.rules.daemon.process import Daemon
    from trainwarden.rules.daemon.systemd import notify
    from trainwarden.rules.logs import set_up
    from trainwarden.rules.replay.columns import MapError, parse_maps
    from trainwarden.rules.replay.readers import FORMATS
    from trainwarden.rules.replay.recordings import JOURNAL
    from trainwarden.rules.rulefiles import RuleFileError, read_packs
    from trainwarden.rules.store import StoreError

    if files and not follow:
        raise typer.BadParameter(f"{files[0]}: log files are followed with --follow FILE")
    if format not in ("auto", JOURNAL, *FORMATS):
        raise typer.BadParameter(f"--format {format}: it is one of auto, {', '.join([JOURNAL, *FORMATS])}")
    try:
        followed = Follow([*(follow or []), *(files or [])], format, parse_maps(map or []))
    except MapError as error:
        raise typer.BadParameter(str(error)) from None
    stop = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: stop.set())
    try:
        overrides = {
            # A path that was typed is relative to where it was typed, one in the file to the file.
            "state": None if state is None else str(Path(state).absolute()),
            "listen": listen,
            "poll_interval": poll_interval,
            "mode": mode,
            "log_level": log_level,
            "log_format": log_format,
        }
        file = config or Path("trainwarden.yml")
        if follow and config is None and not file.exists():
            settings = read_config(_WITHOUT_FILE, "--follow", Path.cwd(), overrides)
        else:
            settings = load_config(file, overrides)
        pack = read_packs(settings.rules, settings.path("."))
        set_up(settings.log.level, settings.log.format)
        settle()
        daemon = Daemon(settings, pack, follow=followed)
        daemon.start()
    except (ConfigError, RuleFileError, StoreError, OSError) as error:
        fail(str(error))
    notify("READY=1")
    while not stop.wait(0.2):
        if daemon.broken.is_set():
            break
    notify("STOPPING=1")
    daemon.stop()
    if daemon.unwritten:
        raise typer.Exit(1)  # said in the log
    if daemon.broken.is_set():
        fail("the core thread ended; the log says why. A restart goes on from the last transaction")
