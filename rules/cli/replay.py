"""``trainwarden replay``: recorded runs through the rules and the judgement, on paper."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from trainwarden.rules.cli.output import console, fail, write

app = typer.Typer()


class Output(StrEnum):
    """How the result is written."""

    text = "text"
    json = "json"


@app.command()
def replay(
    files: Annotated[list[str], typer.Argument(help="Journals, globs, run folders, or - for standard input.")],
    rules: Annotated[list[str] | None, typer.Option(help="Rules: a shipped pack or a file; may be repeated.")] = None,
    policy: Annotated[Path | None, typer.Option(help="YAML file with the policy's settings.")] = None,
    config: Annotated[Path | None, typer.Option(help="Take rules and policy from a daemon's configuration.")] = None,
    output: Annotated[Output, typer.Option(help="text or json.")] = Output.text,
    to: Annotated[Path | None, typer.Option("-o", help="Write to this file.")] = None,
) -> None:
    """Judge recorded runs as the daemon would have: the same rules, the same decisions, nothing delivered.

    The policy acts on paper, whatever mode it has: "action" and "plan" say what mode act would have done.
    """
    import sys
    import tempfile

    from trainwarden.rules.config import ConfigError, load_config, load_policy
    from trainwarden.rules.core.settings import Settings
    from trainwarden.rules.replay.driver import Replay
    from trainwarden.rules.replay.journal import ReplayError, find_recordings, merged
    from trainwarden.rules.replay.report import report, to_json, to_text
    from trainwarden.rules.rulefiles import RuleFileError, read_packs

    if policy is not None and config is not None:
        raise typer.BadParameter("give either --policy or --config")
    try:
        daemon = None if config is None else load_config(config)
        settings = daemon.policy if daemon else Settings() if policy is None else load_policy(policy)
        if rules or daemon is None:
            pack = read_packs(rules or ["default"])
        else:
            pack = read_packs(daemon.rules, daemon.path("."))
        with tempfile.TemporaryDirectory(prefix="trainwarden-replay-") as spool:
            reports = [
                report(recording, Replay(settings, pack).run(merged(recording)))
                for recording in find_recordings(files, sys.stdin.buffer, Path(spool))
            ]
    except (ConfigError, RuleFileError, ReplayError) as error:
        fail(str(error))
    if output is Output.json:
        write(to_json(reports), to)
    else:
        to_text(reports, console(to))
