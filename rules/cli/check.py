"""``trainwarden check config|rules``: everything that is wrong in a file, before it is used."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from trainwarden.rules.cli.output import fail

app = typer.Typer(no_args_is_help=True, help="Check a configuration or rules, and say all that is wrong at once.")


@app.command("config")
def check_config(file: Annotated[Path, typer.Argument(help="The daemon's configuration.")]) -> None:
    """Check a configuration with the rules and secrets that it names."""
    from trainwarden.rules.config import ConfigError, load_config
    from trainwarden.rules.daemon.process import make_notifiers
    from trainwarden.rules.rulefiles import RuleFileError, read_packs

    errors: list[str] = []
    try:
        config = load_config(file)
    except ConfigError as error:
        fail(str(error))
    try:
        read_packs(config.rules, config.path("."))
    except RuleFileError as error:
        errors += error.errors
    try:
        make_notifiers(config)
    except ConfigError as error:
        errors += error.errors
    if errors:
        fail("\n".join(errors))
    acts = f"mode {config.policy.mode}" + ("" if config.receiver else ", no receiver: nothing can be acted upon")
    typer.echo(f"{file}: fine ({len(config.sources)} sources, rules {', '.join(config.rules)}, {acts})")


@app.command("rules")
def check_rules(files: Annotated[list[str], typer.Argument(help="Rule files, names of shipped packs, or -.")]) -> None:
    """Check rule files."""
    import sys

    from trainwarden.rules.rulefiles import RuleFileError, check_packs, read_packs

    errors: list[str] = []
    for name in files:
        try:
            pack = check_packs([(sys.stdin.read(), "standard input")]) if name == "-" else read_packs([name])
        except RuleFileError as error:
            errors += error.errors
        else:
            typer.echo(f"{name}: fine ({len(pack.rules)} rules)")
    if errors:
        fail("\n".join(errors))
