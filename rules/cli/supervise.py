"""``trainwarden supervise -- CMD…``: the local scheduler that the receiver drives."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from trainwarden.rules.cli.output import fail

app = typer.Typer()


@app.command(context_settings={"ignore_unknown_options": True, "allow_interspersed_args": False})
def supervise(
    command: Annotated[list[str], typer.Argument(metavar="-- CMD…", help="The training command.")],
    run: Annotated[str, typer.Option(envvar="TRAINWARDEN_RUN", help="Name of the run.")],
    folder: Annotated[
        Path | None, typer.Option("--dir", help="Folder of runs; default $TRAINWARDEN_DIR or ./.trainwarden.")
    ] = None,
    grace: Annotated[float, typer.Option(help="Seconds between SIGTERM and SIGKILL.")] = 30.0,
    max_restarts: Annotated[int, typer.Option(help="Restarts after crashes in a row before it gives up.")] = 3,
) -> None:
    """Run a training command, start it again after a crash or a rollback, and pass its exit code on."""
    from trainwarden.receiver.supervise import SupervisorBusyError, supervise
    from trainwarden.runfolder import RunFolderError

    try:
        code = supervise(command, run=run, base=folder, grace=grace, max_restarts=max_restarts)
    except (ValueError, RunFolderError, SupervisorBusyError, OSError) as error:
        fail(str(error))
    raise typer.Exit(code)
