"""``trainwarden doctor``: does this machine have what a configuration needs, and can its sources be seen?"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

app = typer.Typer()


@app.command()
def doctor(
    config: Annotated[Path, typer.Option(envvar="TRAINWARDEN_CONFIG", help="Configuration file.")] = Path(
        "trainwarden.yml"
    ),
) -> None:
    """Check what lies around the daemon: configuration, rules, secrets, sources and receiver, each by trying it."""
    import platform

    import trainwarden
    from trainwarden.rules.config import ConfigError, load_config
    from trainwarden.rules.core.counted import counted
    from trainwarden.rules.daemon.process import make_webhook
    from trainwarden.rules.rulefiles import RuleFileError, read_packs
    from trainwarden.rules.sources.exporter import probe
    from trainwarden.rules.sources.folder import find_targets

    wrong = 0

    def say(fine: bool, what: str, says: str) -> None:
        nonlocal wrong
        wrong += not fine
        typer.echo(f"{'ok  ' if fine else 'FAIL'} {what}: {says}")

    typer.echo(f"trainwarden {trainwarden.__version__}, Python {platform.python_version()}, {platform.platform()}")
    try:
        settings = load_config(config)
    except ConfigError as error:
        say(False, "configuration", str(error))
        raise typer.Exit(1) from None
    say(True, "configuration", f"{config}, mode {settings.policy.mode}")
    try:
        say(True, "rules", counted(len(read_packs(settings.rules, settings.path(".")).rules), "rule"))
    except RuleFileError as error:
        say(False, "rules", str(error))
    targets, problems = find_targets(settings.sources, settings.path("."))
    for problem in problems:
        say(False, "target file", problem)
    for target in targets:
        say(*probe(target, settings.limits))
    if not targets:
        say(True, "sources", "none now; they are looked for at every poll")
    if settings.receiver is not None:
        try:
            receiver = make_webhook(settings, settings.receiver)
        except ConfigError as error:
            say(False, "receiver", str(error))
        else:
            says = receiver.reachable()
            say(not says, "receiver", says or f"{settings.receiver.url} answers")
    raise typer.Exit(1 if wrong else 0)
