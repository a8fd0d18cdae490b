"""``trainwarden replay``: recorded runs through the rules and the judgement, on paper."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from trainwarden.rules.cli.output import console, fail, write

if TYPE_CHECKING:
    from trainwarden.rules.report.files import Pages

app = typer.Typer()


class Output(StrEnum):
    """How the result is written."""

    text = "text"
    json = "json"
    html = "html"
    markdown = "markdown"


@app.command()
def replay(
    files: Annotated[list[str], typer.Argument(help="Logs and journals, globs, run folders, or - for standard input.")],
    rules: Annotated[list[str] | None, typer.Option(help="Rules: a shipped pack or a file; may be repeated.")] = None,
    policy: Annotated[Path | None, typer.Option(help="YAML file with the policy's settings.")] = None,
    config: Annotated[Path | None, typer.Option(help="Take rules and policy from a daemon's configuration.")] = None,
    planned: Annotated[Path | None, typer.Option(help="YAML file of planned changes; see docs/replay.md.")] = None,
    inputs: Annotated[
        Path | None,
        typer.Option(help="A daemon's database: what people and the receiver did is replayed too. Needs --config."),
    ] = None,
    format: Annotated[str, typer.Option(help="The files' format: auto, journal, csv…; see docs/replay.md.")] = "auto",
    map: Annotated[
        list[str] | None, typer.Option(help="SIGNAL=COLUMN, such as loss=train/loss; may be repeated.")
    ] = None,
    suspects: Annotated[
        Path | None,
        typer.Option(help="Write what the runs remember of their data, for Exporter(exclude=…); see docs/suspects.md."),
    ] = None,
    output: Annotated[
        Output, typer.Option(help="text, json, html (a page a run) or markdown (a report an incident).")
    ] = Output.text,
    to: Annotated[
        Path | None, typer.Option("-o", help="Write to this file; a folder for pages of several runs.")
    ] = None,
) -> None:
    """Judge recorded runs as the daemon would have: the same rules, the same decisions, nothing delivered.

    The policy acts on paper, whatever mode it has: "action" and "plan" say what mode act would have done. With --inputs it
    has its own mode, and "done" says what came of it.
    """
    import sys
    import tempfile

    from msgspec import structs

    from trainwarden.rules.cli.progress import reading
    from trainwarden.rules.cli.suspects import write_exclusions
    from trainwarden.rules.collector import settle
    from trainwarden.rules.config import ConfigError, load_config, load_planned, load_policy
    from trainwarden.rules.core.planned import unmatched
    from trainwarden.rules.core.settings import Settings
    from trainwarden.rules.core.sightings import Book, row
    from trainwarden.rules.replay.columns import MapError, parse_maps
    from trainwarden.rules.replay.driver import Replay
    from trainwarden.rules.replay.files import ReplayError
    from trainwarden.rules.replay.letter import Letter, of_run
    from trainwarden.rules.replay.readers import FORMATS
    from trainwarden.rules.replay.recordings import JOURNAL, Problem, find_recordings, lost_columns, merged
    from trainwarden.rules.replay.report import report, to_json
    from trainwarden.rules.report.files import Pages, PagesError
    from trainwarden.rules.report.markdown import reports_of
    from trainwarden.rules.report.recorded import Recorded
    from trainwarden.rules.report.terminal import to_text
    from trainwarden.rules.rulefiles import RuleFileError, read_packs
    from trainwarden.rules.store import StoreError, inputs_in

    if policy is not None and config is not None:
        raise typer.BadParameter("give either --policy or --config")
    if inputs is not None and config is None:
        raise typer.BadParameter("--inputs needs --config: the daemon's own policy decided what was done")
    if format not in ("auto", JOURNAL, *FORMATS):
        raise typer.BadParameter(f"--format {format}: it is one of auto, {', '.join([JOURNAL, *FORMATS])}")
    try:
        maps = parse_maps(map or [])
    except MapError as error:
        raise typer.BadParameter(str(error)) from None
    problems: list[Problem] = []
    try:
        daemon = None if config is None else load_config(config)
        settings = daemon.settings if daemon else Settings() if policy is None else load_policy(policy)
        if planned is not None:
            changes = (*settings.planned_changes, *load_planned(planned))
            settings = structs.replace(settings, planned_changes=changes)
        journalled = None if inputs is None else inputs_in(inputs)
        if rules or daemon is None:
            pack = read_packs(rules or ["default"])
        else:
            pack = read_packs(daemon.rules, daemon.path("."))
        with tempfile.TemporaryDirectory(prefix="trainwarden-replay-") as spool:
            reports = []
            remembered: Book = {}  # one memory, in the order in which the runs are named
            recordings = find_recordings(
                files, sys.stdin.buffer, Path(spool), format=format, maps=maps, problems=problems
            )
            pages = Pages(to, len(recordings), reads=pack.reads, settings=settings) if output is Output.html else None
            for says in unmatched(settings, [one.run for one in recordings]):
                typer.echo(f"notice: {says}", err=True)
            settle()
            with reading(path for recording in recordings for path in recording.paths()) as told:
                for recording in recordings:
                    columns = Recorded()
                    lines = merged(recording, told(recording.run))
                    try:
                        if pages is not None:
                            lines = columns.watch(lines)
                        if journalled is None or daemon is None:
                            reports.append(report(recording, Replay(settings, pack, remembered).run(lines), pack))
                        else:
                            its = structs.replace(settings, receiver=daemon.receiver is not None)
                            letter = Letter(
                                its, pack, of_run(journalled, recording.run_uid, recording.stream_names()), remembered
                            )
                            reports.append(report(recording, letter.run(lines), pack, paper=False))
                    except ReplayError as error:
                        problems.append(Problem(recording.source, str(error)))
                        continue
                    if pages is not None:
                        pages.add(reports[-1], columns)
    except (ConfigError, RuleFileError, StoreError) as error:
        fail(str(error))
    except PagesError as error:
        fail(str(error), 2 if error.usage else 1)
    if suspects is not None:
        write_exclusions([row(one) for one in remembered.values()], suspects)
    lost = lost_columns(recordings, maps)
    if lost:
        fail("\n".join(lost + [problem.says for problem in problems]))
    if pages is not None:
        if reports:
            write_pages(pages)
    elif output is Output.json:
        write(to_json(reports), to)
    elif output is Output.markdown:
        write(reports_of(reports).encode(), to)
    else:
        to_text(reports, console(to))
    if problems:
        fail("\n".join(problem.says for problem in problems))


def write_pages(pages: Pages) -> None:
    """Write the page of a single run to standard output or its file, or say where the pages are."""
    page, path = pages.finish()
    if page is not None:
        write(page.encode(), path)
    elif path is not None:
        typer.echo(f"Pages written: {path}", err=True)
