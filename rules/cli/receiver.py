"""``trainwarden receiver``: the process beside the scheduler that carries signed requests out."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from trainwarden.rules.cli.output import fail

app = typer.Typer(invoke_without_command=True)


@app.callback()
def receiver(
    context: typer.Context,
    config: Annotated[Path | None, typer.Option(help="Settings as YAML; flags win over it.")] = None,
    listen: Annotated[str | None, typer.Option(help="host:port; port 0 takes a free one and says which.")] = None,
    secret_file: Annotated[Path | None, typer.Option(help="File with the webhook's secret.")] = None,
    root: Annotated[list[Path] | None, typer.Option(help="Folder of runs; may be repeated.")] = None,
    checkpoints: Annotated[
        list[Path] | None, typer.Option(help="Folder that checkpoints may lie in besides the roots; may be repeated.")
    ] = None,
    db: Annotated[Path | None, typer.Option(help="Database of the requests, on a local disk.")] = None,
) -> None:
    """Verify signed requests and carry them out through the supervisor of the run."""
    if context.invoked_subcommand is not None:
        return
    from trainwarden.receiver.main import DatabaseBusyError, serve
    from trainwarden.receiver.secretfile import SecretFileError
    from trainwarden.receiver.settings import SettingsError, settings_from
    from trainwarden.rules.yamltext import Document, YamlError, load

    document: Document | None = None
    settings: Any = {}
    try:
        if config is not None:
            document = load(config.read_text(encoding="utf-8"), str(config))
            settings = document.value if document.value is not None else {}
        flags = {
            "listen": listen,
            "secret_file": None if secret_file is None else str(secret_file),
            "roots": [str(path) for path in root] if root else None,
            "checkpoints": [str(path) for path in checkpoints] if checkpoints else None,
            "db": None if db is None else str(db),
        }
        if isinstance(settings, dict):
            settings = {**settings, **{name: value for name, value in flags.items() if value is not None}}
        serve(settings_from(settings))
    except SettingsError as error:
        if document is None:
            fail(f"receiver: {error}")
        fail(str(document.problem(document.position(error.path), str(error))))
    except (YamlError, SecretFileError, DatabaseBusyError, OSError, UnicodeDecodeError) as error:
        fail(f"receiver: {error}")


@app.command("new-secret")
def new_secret(file: Annotated[Path, typer.Argument(help="File to write; never overwritten.")]) -> None:
    """Write a fresh webhook secret, readable by this user alone."""
    from trainwarden.receiver.secretfile import SecretFileError, write_new_secret

    try:
        write_new_secret(file)
    except (SecretFileError, OSError) as error:
        fail(str(error))
    typer.echo(f"{file}: written; give it to the daemon and to the receiver")
