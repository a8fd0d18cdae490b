"""``trainwarden exec -- CMD…``: a training command whose script has not a line of ours, watched all the same."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from trainwarden.rules.cli.output import fail

app = typer.Typer()


@app.command(context_settings={"allow_interspersed_args": False})
def exec(
    command: Annotated[list[str], typer.Argument(metavar="-- CMD…", help="The training command.")],
    run: Annotated[str | None, typer.Option(envvar="TRAINWARDEN_RUN", help="Name of the run; default run.")] = None,
    folder: Annotated[
        Path | None, typer.Option("--dir", help="Folder of runs; default $TRAINWARDEN_DIR or ./.trainwarden.")
    ] = None,
    host: Annotated[str, typer.Option(help="Address to serve on.")] = "127.0.0.1",
    port: Annotated[
        int | None, typer.Option(min=0, max=65535, help="Port of local rank 0; default 17070, 0 is any free one.")
    ] = None,
    cadence: Annotated[
        int | None, typer.Option(min=1, help="The costly probes run every so many steps; default 10.")
    ] = None,
) -> None:
    """Become a training command that is watched without a changed line: each Python process below attaches by itself.

    Signals, exit code and terminal are the command's own. 127: there is no such command, 126: it cannot be started.
    """
    import json
    import os
    import signal

    from trainwarden.exporter import startup
    from trainwarden.runfolder import RunFolder, RunFolderError, base_folder

    base = (folder or base_folder()).absolute()
    name = run or "run"
    try:
        RunFolder(name, base)
    except RunFolderError as error:
        fail(str(error), 2)
    hook = str(Path(startup.__file__).parent)
    before = os.environ.get("PYTHONPATH")
    environment = {
        **os.environ,
        "TRAINWARDEN_RUN": name,
        "TRAINWARDEN_DIR": str(base),
        "TRAINWARDEN_EXEC": json.dumps({"host": host, "port": port, "cadence": cadence}),
        "PYTHONPATH": f"{hook}{os.pathsep}{before}" if before else hook,
    }
    flag = _deaf(command)
    if flag is not None:
        typer.echo(
            f"trainwarden exec: {command[0]} {flag} takes no notice of PYTHONPATH: this process is not observed",
            err=True,
        )
    for number in (signal.SIGPIPE, signal.SIGXFSZ):  # Python ignores them; the command must not inherit that
        signal.signal(number, signal.SIG_DFL)
    try:
        os.execvpe(command[0], command, environment)
    except (FileNotFoundError, ValueError):  # an empty word is no command, either
        fail(f"trainwarden exec: {command[0]}: no such command", 127)
    except OSError as error:
        fail(f"trainwarden exec: {command[0]}: cannot be started: {error.strerror}", 126)


def _deaf(command: list[str]) -> str | None:
    """Return the option by which a Python command takes no notice of where we stand, or None.

    ``-I`` and ``-E`` leave out PYTHONPATH, ``-S`` leaves out ``sitecustomize``.
    """
    if not Path(command[0]).name.startswith(("python", "pypy")):
        return None
    words = iter(command[1:])
    for word in words:
        if not word.startswith("-") or word in ("-", "--"):
            return None
        for letter in () if word.startswith("--") else word[1:]:
            if letter in "IES":
                return f"-{letter}"
            if letter in "cm":
                return None
            if letter in "WX":
                if word.endswith(letter):
                    next(words, None)
                break
    return None
