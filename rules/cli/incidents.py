"""``trainwarden incidents list|show|ack|approve|dismiss|suspects``: what the running daemon found, and a word about it, through its API."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

import typer

from trainwarden.rules.cli import suspects
from trainwarden.rules.cli.output import console, fail, write

app = typer.Typer(no_args_is_help=True, help="Look at the incidents of a running daemon, and answer for them.")
app.add_typer(suspects.app, name="suspects")

Url = Annotated[str, typer.Option("--url", envvar="TRAINWARDEN_URL", help="Address of the daemon's API.")]
HERE = "http://127.0.0.1:17080"
Identity = Annotated[str, typer.Argument(metavar="ID", help="The incident's id.")]
TokenFile = Annotated[
    Path,
    typer.Option("--token-file", envvar="TRAINWARDEN_ACT_TOKEN_FILE", help="The daemon's act_token_file (mode 0600)."),
]
Author = Annotated[str, typer.Option(help="Who says so; default: the user who runs the command.")]
Comment = Annotated[str, typer.Option(help="Why; it is kept in the timeline.")]


class Output(StrEnum):
    """How the result is written."""

    text = "text"
    json = "json"


@app.command("list")
def list_incidents(
    run: Annotated[str | None, typer.Option(help="Only those of this run.")] = None,
    state: Annotated[str | None, typer.Option(help="Only those in this state.")] = None,
    output: Annotated[Output, typer.Option(help="text or json.")] = Output.text,
    url: Url = HERE,
) -> None:
    """List incidents, newest first."""
    wanted = {name: value for name, value in (("run", run), ("state", state)) if value is not None}
    rows = _ask(url, "/api/v1/incidents", wanted)
    if output is Output.json:
        _write_json(rows)
        return
    from rich.table import Table

    if not rows:
        typer.echo("no incident")
        return
    table = Table(box=None, header_style="dim")
    names = ("id", "run", "attempt", "onset_step", "state", "severity", "verdict", "cause", "action")
    for name in names:
        table.add_column(name.replace("_", " "))
    for row in rows:
        row = {**row, "cause": (row.get("cause") or {}).get("name", "")}
        table.add_row(*("" if row.get(name) is None else str(row[name]) for name in names))
    console().print(table)


@app.command("show")
def show_incident(
    identity: Identity,
    output: Annotated[Output, typer.Option(help="text or json.")] = Output.text,
    to: Annotated[
        Path | None, typer.Option("-o", help="Write its report to this file: a page (.html) or Markdown (.md).")
    ] = None,
    url: Url = HERE,
) -> None:
    """Show one incident with its evidence, plan and timeline."""
    from urllib.parse import quote

    if to is not None:
        _write_report(url, identity, to)
        return
    row = _ask(url, f"/api/v1/incidents/{quote(identity, safe='')}", None)
    if output is Output.json:
        _write_json(row)
        return
    from trainwarden.rules.report.terminal import incident_to_text

    incident_to_text(row, console())


@app.command("ack")
def acknowledge_incident(
    identity: Identity, token_file: TokenFile, author: Author = "", comment: Comment = "", url: Url = HERE
) -> None:
    """Say that somebody looks after an incident: what is decided about it waits for their approval."""
    _tell(url, identity, "acknowledge", token_file, author, comment, None)


@app.command("approve")
def approve_incident(
    identity: Identity,
    token_file: TokenFile,
    plan: Annotated[str, typer.Option(help="Id of the plan that you saw; another one is not approved.")],
    author: Author = "",
    comment: Comment = "",
    url: Url = HERE,
) -> None:
    """Let the plan of an incident be carried out."""
    _tell(url, identity, "approve", token_file, author, comment, plan)


@app.command("dismiss")
def dismiss_incident(
    identity: Identity, token_file: TokenFile, author: Author = "", comment: Comment = "", url: Url = HERE
) -> None:
    """Close an incident without action."""
    _tell(url, identity, "dismiss", token_file, author, comment, None)


def _write_report(url: str, identity: str, to: Path) -> None:
    from urllib.parse import quote

    from trainwarden.rules.cli.client import ApiError, page

    ends = {".html": "", ".md": ".md"}
    if to.suffix not in ends:
        raise typer.BadParameter(f"-o {to}: a report is a page (.html) or Markdown (.md)")
    try:
        write(page(url, f"/incidents/{quote(identity, safe='')}{ends[to.suffix]}"), to)
    except ApiError as error:
        fail(str(error))


def _tell(url: str, identity: str, name: str, token_file: Path, author: str, comment: str, plan: str | None) -> None:
    import getpass
    from urllib.parse import quote

    from trainwarden.rules.cli.client import ApiError, tell
    from trainwarden.rules.config import ConfigError, read_secret

    body = {"author": author or getpass.getuser(), "comment": comment, "plan_id": plan}
    try:
        tell(url, f"/api/v1/incidents/{quote(identity, safe='')}/{name}", read_secret(token_file), body)
    except (ApiError, ConfigError) as error:
        fail(str(error))
    typer.echo(f"{name}: taken; `trainwarden incidents show {identity}` tells what came of it")


def _ask(url: str, path: str, params: dict[str, str] | None) -> Any:
    from trainwarden.rules.cli.client import ApiError, ask

    try:
        return ask(url, path, params)
    except ApiError as error:
        fail(str(error))


def _write_json(value: Any) -> None:
    import msgspec

    write(msgspec.json.format(msgspec.json.encode(value), indent=2) + b"\n", None)
