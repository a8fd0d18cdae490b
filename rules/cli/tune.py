"""``trainwarden tune``: how often rules would have fired on healthy logs, and thresholds for a wanted rate."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

import typer

from trainwarden.rules.cli.output import console, fail, write

app = typer.Typer()


class Output(StrEnum):
    """How the result is written."""

    text = "text"
    json = "json"
    yaml = "yaml"


@app.command()
def tune(
    files: Annotated[list[str], typer.Argument(help="Healthy logs: all that replay reads, globs, folders, or -.")],
    rules: Annotated[list[str] | None, typer.Option(help="Rules: a shipped pack or a file; may be repeated.")] = None,
    rate: Annotated[float, typer.Option(min=0, help="Wanted firings of a rule per 100,000 records.")] = 1.0,
    format: Annotated[str, typer.Option(help="The files' format: auto, journal, csv…; see docs/replay.md.")] = "auto",
    map: Annotated[
        list[str] | None, typer.Option(help="SIGNAL=COLUMN, such as loss=train/loss; may be repeated.")
    ] = None,
    sensitive: Annotated[
        bool,
        typer.Option(
            "--sensitive", help="With yaml: also make rules fire more often, where they fire less than wanted."
        ),
    ] = False,
    output: Annotated[Output, typer.Option(help="text, json, or yaml: a rule file with the thresholds.")] = Output.text,
    to: Annotated[Path | None, typer.Option("-o", help="Write to this file.")] = None,
) -> None:
    """Say how often each rule fires on logs of healthy runs, and which threshold would fire as often as wanted."""
    import sys
    import tempfile

    import msgspec

    from trainwarden.rules.replay.columns import MapError, parse_maps
    from trainwarden.rules.replay.files import ReplayError
    from trainwarden.rules.replay.readers import FORMATS
    from trainwarden.rules.replay.recordings import JOURNAL, find_recordings, lost_columns, merged
    from trainwarden.rules.rulefiles import RuleFileError, check_packs, text_of
    from trainwarden.rules.tune.logs import starts
    from trainwarden.rules.tune.overrides import overriding
    from trainwarden.rules.tune.threshold import RuleText
    from trainwarden.rules.tune.tune import tune as tuned_by

    names = rules or ["default"]
    if output is Output.yaml and len(names) > 1:
        raise typer.BadParameter("--output yaml writes one file: name one pack with --rules")
    if format not in ("auto", JOURNAL, *FORMATS):
        raise typer.BadParameter(f"--format {format}: it is one of auto, {', '.join([JOURNAL, *FORMATS])}")
    try:
        maps = parse_maps(map or [])
    except MapError as error:
        raise typer.BadParameter(str(error)) from None
    try:
        texts = [text_of(name) for name in names]
        pack = check_packs(texts)
        with tempfile.TemporaryDirectory(prefix="trainwarden-tune-") as spool:
            recordings = find_recordings(files, sys.stdin.buffer, Path(spool), format=format, maps=maps)
            blocks = [block for recording in recordings for block in starts(merged(recording))]
            damaged = [row["says"] for recording in recordings for row in recording.notices if row["kind"] == "damaged"]
    except (RuleFileError, ReplayError) as error:
        fail(str(error))
    if lost := lost_columns(recordings, maps):
        fail("\n".join(lost))
    for says in damaged:
        typer.echo(f"notice: {says}", err=True)
    if not blocks:
        fail("there is no step in these logs")
    read = [RuleText.of(*text) for text in texts]
    found = tuned_by(pack, read, blocks, rate)
    if output is Output.yaml:
        write(overriding(read[0], found, sensitive).encode(), to)
    elif output is Output.json:
        write(msgspec.json.format(msgspec.json.encode(found), indent=2) + b"\n", to)
    else:
        _to_text(found, console(to))


def _to_text(found: Any, console: Any) -> None:
    from rich.table import Table
    from rich.text import Text

    from trainwarden.rules.core.counted import counted

    console.print(Text(f"{counted(found.records, 'record')} of {counted(found.starts, 'start')}"))
    allowed = f"at {found.rate:g} per 100k, a rule may fire {counted(found.allowed, 'time')} in them"
    if found.rate * found.records < 100_000:
        allowed += f"; to tell this rate takes {100_000 / found.rate:.0f} records" if found.rate else ""
    console.print(Text(allowed, style="dim"))
    table = Table(box=None, pad_edge=False, header_style="dim")
    for name, justify in (("rule", "left"), ("severity", "left"), ("fired", "right"), ("per 100k", "right"), ("threshold", "right"), ("tuned", "right"), ("fires then", "right"), ("remark", "left")):  # fmt: skip
        table.add_column(name, justify=justify)  # type: ignore[arg-type]
    for one in found.rules:
        numbers = [f"{one.fired}", f"{one.per_100k:.1f}"]
        numbers += ["" if value is None else f"{value:.6g}" for value in (one.threshold, one.tuned, one.tuned_fired)]
        table.add_row(
            one.rule, one.severity, *numbers, Text(one.why or (f"moves {one.moves}" if one.moves else ""), style="dim")
        )
    console.print(table)
