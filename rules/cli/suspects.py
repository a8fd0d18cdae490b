"""``trainwarden incidents suspects [forget]``: the samples that spiked, as a daemon remembers them, and as data to leave out."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

import typer

from trainwarden.rules.cli.output import console, fail, write

app = typer.Typer()

Url = Annotated[str, typer.Option("--url", envvar="TRAINWARDEN_URL", help="Address of the daemon's API.")]
HERE = "http://127.0.0.1:17080"
Run = Annotated[str | None, typer.Option(help="Only what this run saw.")]
Dataset = Annotated[str | None, typer.Option(help="Only samples of this data set.")]


class Format(StrEnum):
    """How suspects are written."""

    text = "text"
    json = "json"
    plan = "plan"
    txt = "txt"


@app.callback(invoke_without_command=True)
def suspects(
    context: typer.Context,
    run: Run = None,
    dataset: Dataset = None,
    format: Annotated[
        Format,
        typer.Option(help="text; json; plan (a file for Exporter(exclude=…)); txt (data set, shard, first row, end)."),
    ] = Format.text,
    weak: Annotated[
        bool, typer.Option("--weak", help="Leave out what a single odd step without a known cause ate, too.")
    ] = False,
    all: Annotated[bool, typer.Option("--all", help="Show what was cleared, dismissed or forgotten, too.")] = False,
    to: Annotated[Path | None, typer.Option("-o", help="Write to this file.")] = None,
    url: Url = HERE,
) -> None:
    """Show samples that spiked, or write them as data for a new run to leave out."""
    if context.invoked_subcommand is not None:
        return
    from trainwarden.rules.cli.client import ApiError, ask

    wanted = {name: value for name, value in (("run", run), ("dataset", dataset)) if value is not None}
    try:
        rows = ask(url, "/api/v1/suspects", {**wanted, **({"all": "1"} if all else {})})
    except ApiError as error:
        fail(str(error))
    if format is Format.json:
        import msgspec

        write(msgspec.json.format(msgspec.json.encode(rows), indent=2) + b"\n", to)
    elif format is Format.text:
        _to_text(rows, to)
    else:
        write_exclusions(rows, to, weak=weak, lines=format is Format.txt)


def write_exclusions(rows: list[dict[str, Any]], to: Path | None, *, weak: bool = False, lines: bool = False) -> None:
    """Write what new runs should leave out, and say on standard error what cannot be named by rows."""
    from trainwarden.rules.exclusions import exclusions, to_file, to_lines

    found, notices = exclusions(rows, weak=weak)
    for says in notices:
        typer.echo(f"notice: {says}", err=True)
    write(to_lines(found) if lines else to_file(found), to)


@app.command("forget")
def forget(
    identities: Annotated[
        list[str] | None, typer.Argument(metavar="[ID]…", help="Ids that `incidents suspects` shows.")
    ] = None,
    token_file: Annotated[
        Path | None,
        typer.Option(
            "--token-file", envvar="TRAINWARDEN_ACT_TOKEN_FILE", help="The daemon's act_token_file (mode 0600)."
        ),
    ] = None,
    run: Annotated[str | None, typer.Option(help="All that this run saw.")] = None,
    dataset: Annotated[str | None, typer.Option(help="All samples of this data set.")] = None,
    everything: Annotated[bool, typer.Option("--all", help="All that is remembered.")] = False,
    author: Annotated[str, typer.Option(help="Who says so; default: the user who runs the command.")] = "",
    comment: Annotated[str, typer.Option(help="Why; it is kept with what is forgotten.")] = "",
    url: Url = HERE,
) -> None:
    """Have suspect samples forgotten: no later run is told of them any more."""
    import getpass

    from trainwarden.rules.cli.client import ApiError, tell
    from trainwarden.rules.config import ConfigError, read_secret

    if token_file is None:
        raise typer.BadParameter("--token-file: name the daemon's act_token_file")
    given = {name: value for name, value in (("run", run), ("dataset", dataset)) if value is not None}
    if everything:
        given["all"] = "1"
    if bool(identities) == bool(given):
        raise typer.BadParameter("give ids, or --run, --dataset or --all")
    for which in [{"id": one} for one in identities or ()] or [given]:
        body = {"author": author or getpass.getuser(), "comment": comment, "which": which}
        try:
            taken = tell(url, "/api/v1/suspects/forget", read_secret(token_file), body)
        except (ApiError, ConfigError) as error:
            fail(str(error))
        typer.echo(f"forget: taken; {taken['meant']} meant")


def _to_text(rows: list[dict[str, Any]], to: Path | None) -> None:
    from rich.table import Table

    if not rows:
        typer.echo("no suspect samples")
        return
    table = Table(box=None, header_style="dim")
    for name in ("id", "data set", "samples", "state", "confidence", "seen", "run", "step", "incident", "by"):
        table.add_column(name, overflow="fold")
    for row in rows:
        state = f"{row['state']}, weak" if row["weak"] and row["state"] == "suspect" else row["state"]
        sure, seen, where = f"{row['confidence']:.2f}", str(row["seen"]), row["where"]
        told = (row["id"], row["dataset"] or "(no name)", where, state, sure, seen)
        table.add_row(*told, row["run"], str(row["step"]), row["incident"], row["by"])
    console(to).print(table)
