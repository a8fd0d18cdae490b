"""``trainwarden check config|rules|schema``: everything that is wrong in a file, before it is used."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

import typer

from trainwarden.rules.cli.output import fail, write

app = typer.Typer(no_args_is_help=True, help="Check a configuration or rules, and say all that is wrong at once.")


class Output(StrEnum):
    """How findings are written."""

    text = "text"
    json = "json"


class Schema(StrEnum):
    """Which files have a schema."""

    rules = "rules"
    config = "config"
    tests = "tests"


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
    receiver = "no receiver" if config.receiver is None else f"receiver {config.receiver.url}"
    says = f"{_count(len(config.sources), 'source')}, rules {', '.join(config.rules)}, mode {config.policy.mode}, {receiver}"
    warnings = config.warnings()
    for warning in warnings:
        typer.echo(f"{file}: warning: {warning}")
    typer.echo(f"{file}: {'usable' if warnings else 'fine'} ({says})")


@app.command("rules")
def check_rules(
    files: Annotated[list[str], typer.Argument(help="Rule files, names of shipped packs, or -.")],
    strict: Annotated[bool, typer.Option("--strict", help="A warning is a failure too.")] = False,
    longest_run: Annotated[int, typer.Option(min=1, help="Steps of the longest start of your runs.")] = 50_000,
    output: Annotated[Output, typer.Option(help="text or json.")] = Output.text,
) -> None:
    """Check rule files: errors, and what can be used but is suspicious."""
    import sys

    from trainwarden.rules.lint.lint import lint
    from trainwarden.rules.rulefiles import RuleFileError, check_packs, text_of

    errors: list[str] = []
    placed: list[dict[str, Any]] = []
    texts: dict[str, tuple[str, str]] = {}
    rules: dict[str, int] = {}
    for name in dict.fromkeys(files):
        try:
            text = (sys.stdin.read(), "standard input") if name == "-" else text_of(name)
            rules[name] = len(check_packs([text]).rules)
            texts[name] = text
        except RuleFileError as error:
            errors += error.errors
            placed += [_row(one, "error", "syntax") for one in error.problems]
            if not error.problems:
                placed.append({"file": name, "severity": "error", "check": "file", "message": str(error)})
    findings = lint(texts.values(), longest_run)
    warnings = sum(one.severity == "warning" for one in findings)
    if output is Output.json:
        import msgspec

        placed += [{**_row(one.problem, one.severity, one.check), "rule": one.rule} for one in findings]
        write(msgspec.json.format(msgspec.json.encode(placed), indent=2) + b"\n", None)
    else:
        for finding in findings:
            typer.echo(str(finding))
        for name, (_, source) in texts.items():
            found = sum(one.problem.source == source for one in findings)
            said = _count(rules[name], "rule") + (f", {_count(found, 'finding')}" if found else "")
            typer.echo(f"{name}: {'usable' if found else 'fine'} ({said})")
    if errors:
        fail("\n".join(errors) if output is Output.text else "there are errors")
    if strict and warnings:
        fail(f"{_count(warnings, 'warning')}, and --strict was given")


@app.command("schema")
def check_schema(of: Annotated[Schema, typer.Argument(help="rules, config, or tests (of rules).")]) -> None:
    """Print the JSON Schema of a file, for editors."""
    from trainwarden.rules.schema import schema_of, to_json

    write(to_json(schema_of(of.value)), None)


def _row(problem: Any, severity: str, check: str) -> dict[str, Any]:
    place = {"file": problem.source, "line": problem.line, "column": problem.column}
    return {**place, "severity": severity, "check": check, "message": problem.message}


def _count(number: int, of: str) -> str:
    return f"{number} {of}{'' if number == 1 else 's'}"
